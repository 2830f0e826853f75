"""A request that cannot go on ends with an error of its own; what was told of its prompt survives merging."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from actors.loop import Phase
from actors.verifier import Standing, Verifier, merge
from cluster.config import EngineConfig
from cluster.errors import RequestError
from cluster.messages import Delta, Fault, Statistics, TokenLogprob
from cluster.model.info import ModelInfo
from cluster.request import Request, Sampling
from tests.actors.fakes import FakeEngine


class Faulty(FakeEngine):
    """Requests with the prompt (13,) fail at their second step."""

    def step(self) -> list[Delta]:
        deltas = []
        for delta in super().step():
            request, done = self._live.get(delta.request, (None, 0))
            if request is not None and request.prompt == (13,) and done == 2:
                del self._live[delta.request]
                delta = Delta(delta.request, (), "", finish="error", fault=Fault("no way on", "logits_processors"))
            deltas.append(delta)
        return deltas


def test_merging_keeps_what_was_told_of_the_prompt_and_the_fault() -> None:
    told, fault = (TokenLogprob(1, -1.0),), Fault("no", "logits_processors")
    first = Delta("r", (1,), "a", statistics=Statistics(output_tokens=1), prompt_logprobs=told)
    last = Delta("r", (), "", finish="error", statistics=Statistics(output_tokens=1, rounds=1), fault=fault)
    merged = merge([first, last])
    assert (merged.prompt_logprobs, merged.fault, merged.finish) == (told, fault, "error")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_is_the_callers_error_and_nobody_elses(stream: bool) -> None:
    engines: list[Faulty] = []

    def build(config: EngineConfig, report: Callable[[str], None]) -> tuple[Faulty, Standing]:
        engines.append(Faulty())
        return engines[0], Standing(ModelInfo("fake", "none", 128, 100, 1, 1, 1, "float32", "cpu", "0"))

    verifier = Verifier(EngineConfig(), build)
    try:
        async with asyncio.timeout(10):
            while (await verifier.progress()).phase is not Phase.RUNNING:
                await asyncio.sleep(0.005)

            async def tokens(name: str, prompt: tuple[int, ...]) -> int:
                chunks = verifier.generate(Request(name, prompt, Sampling(max_tokens=6)), stream)
                return sum([len(chunk.tokens) async for chunk in chunks])

            bad, good = await asyncio.gather(tokens("bad", (13,)), tokens("good", (1,)), return_exceptions=True)
    finally:
        await verifier.stop(0.0)
    assert good == 6
    assert isinstance(bad, RequestError)
    assert (str(bad), bad.param) == ("no way on", "logits_processors")
    assert engines[0].aborted == []
