"""A draft model in a process of its own, over gloo: it may be killed or frozen, and the tokens stay what they are."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.control.length import LengthControl
from cluster.draft.first import FirstOffer
from cluster.draft.proposer import Proposer
from cluster.draft.remote import RemoteProposer
from cluster.engine import Engine, Parts
from cluster.kv.blocks import BlockPool
from cluster.kv.cache import KVCache
from cluster.kv.keys import KeyContext
from cluster.messages import Knobs
from cluster.model.load import load_model, locate
from cluster.model.torch_runner import TorchRunner, arena_for
from cluster.request import Request, Sampling
from cluster.sched.scheduler import Limits, Scheduler
from cluster.verify.judge import Judge
from tests.fakes import ngram, run
from tests.peers import Peers

BLOCKS, BLOCK = 64, 8


def engine_of(directory: Path, *proposers: Proposer) -> Engine:
    loaded = load_model(locate(str(directory)), dtype=torch.float32, device=torch.device("cpu"))
    cache = KVCache(BlockPool(BLOCKS), BLOCK, KeyContext("target"))
    return Engine(
        Parts(
            runner=TorchRunner(loaded, arena_for(loaded.info, BLOCKS, block_tokens=BLOCK)),
            cache=cache,
            scheduler=Scheduler(cache, Limits(8, 64)),
            judge=Judge(loaded.info.vocab_size, frozenset(), None),
            proposer=FirstOffer(proposers),
            control=LengthControl(Knobs(k=4, adaptive=False)),
            max_context=512,
        )
    )


def asked(count: int = 4, length: int = 120) -> list[Request]:
    temperatures = (0.0, 1.0)
    return [
        Request(f"r{n}", tuple(range(n + 1, n + 9)), Sampling(length, temperature=temperatures[n % 2], seed=n))
        for n in range(count)
    ]


@pytest.mark.parametrize("how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_a_drafter_lost_in_the_middle_changes_no_token_and_another_takes_over(
    tiny_model: Callable[[str], Path], how: signal.Signals
) -> None:
    directory = tiny_model("llama")
    twins = {name: answer.tokens for name, answer in run(engine_of(directory), asked()).items()}
    with Peers() as peers:
        channel, process = peers.start("model", str(directory))
        far = RemoteProposer("model", wait_s=5.0)
        far.attach(channel)
        engine = engine_of(directory, far, ngram())
        for request in asked():
            engine.submit(request)
        tokens: dict[str, list[int]] = {name: [] for name in twins}

        def step(times: int) -> None:
            for _ in range(times):
                for delta in engine.step():
                    tokens[delta.request].extend(delta.tokens)

        step(3)
        assert far.stats.hits > 0
        process.send_signal(how)
        far.wait_s = 0.02  # or the few steps left would wait the silence out
        began = time.monotonic()
        while far.drafters:
            step(1)
            assert engine.has_work
            time.sleep(0.2)  # or the answers would be over before a frozen peer can be told from a slow one
        assert time.monotonic() - began < 2.5  # the silence, and the step it fell into
        far.wait_s = 5.0
        far.attach(peers.start("model", str(directory))[0])
        before = far.stats.hits
        while engine.has_work:
            step(1)
        assert far.stats.hits > before
        assert {name: tuple(told) for name, told in tokens.items()} == twins
        far.detach()
