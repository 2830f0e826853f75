"""Puts an engine of emulated devices together: the real parts around a forward pass that is played.

Knows: which parts each mode needs.
Refuses to know: how long it runs and what it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from cluster.control.length import LengthControl
from cluster.draft.first import FirstOffer
from cluster.draft.model import ModelProposer
from cluster.draft.proposer import Proposer
from cluster.engine import Engine, Parts
from cluster.kv.blocks import BlockPool
from cluster.kv.cache import KVCache
from cluster.kv.keys import KeyContext
from cluster.messages import Knobs
from cluster.model.emulated import EmulatedRunner, Script
from cluster.sched.scheduler import Limits, Scheduler
from cluster.verify.judge import Judge
from deploy.simulation.gauge import Gauge
from deploy.simulation.measure import Running
from deploy.simulation.scenario import Mode, Scenario

_BLOCK = 32
#: Emulated drafts fail at random: pauses after unlucky rounds would only blur what is measured.
_NEVER = 1_000_000


@contextmanager
def staged(scenario: Scenario, mode: Mode, batch: int) -> Iterator[Running]:
    """An engine for `batch` sequences in this mode; what it started ends with the block."""
    script = Script(scenario.seed, batch, scenario.length)
    target = EmulatedRunner(script, scenario.target)
    ranks_LP = script.ranks(scenario.acceptance, scenario.k)
    gauge = Gauge(FirstOffer([] if mode == "none" else [_drafter(scenario, script, ranks_LP)]))
    cache = _cache(script)
    knobs = Knobs(
        k=0 if mode == "none" else scenario.k,
        token_budget=batch * (scenario.k + 1 + _BLOCK),
        adaptive=False,
        max_retries=_NEVER,
    )
    engine = Engine(
        Parts(
            runner=target,
            cache=cache,
            scheduler=Scheduler(cache, Limits(batch, batch)),
            judge=Judge(script.vocab_size, frozenset(), None),
            proposer=gauge,
            control=LengthControl(knobs),
            max_context=script.length - 1,
        )
    )
    yield Running(engine, script, ranks_LP, target, gauge)


def _drafter(scenario: Scenario, script: Script, ranks_LP: npt.NDArray[np.int64]) -> Proposer:
    runner = EmulatedRunner(script, scenario.draft, ranks_LP)
    return ModelProposer(runner, _cache(script), script.length - 1)


def _cache(script: Script) -> KVCache:
    blocks = script.lanes * (script.length // _BLOCK + 1)
    return KVCache(BlockPool(blocks), _BLOCK, KeyContext("emulated"), prefix=False)
