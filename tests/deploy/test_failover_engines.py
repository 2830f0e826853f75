"""Twenty answers of a real model go from engine to engine as engines crash and stop under them: same text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from actors.loop import Phase
from actors.verifier import Verifier
from cluster.config import CacheConfig, EngineConfig, KnobConfig, ModelDraft, NgramDraft, TargetConfig
from cluster.errors import EngineStopped, PeerLost
from cluster.request import Request, Sampling
from deploy.asks import Ask, Card, Piece
from deploy.failover import Failover, Patience

COUNT = 20
NGRAM = NgramDraft(kind="ngram", min_match=1)
LAYERS = ModelDraft(kind="model", layers=(0, 2))


def config(model: Path, k: int, *drafts: Any) -> EngineConfig:
    return EngineConfig(
        target=TargetConfig(model=str(model), dtype="float32", threads=1),
        drafts=drafts,
        cache=CacheConfig(blocks=256, block_tokens=8),
        knobs=KnobConfig(k=k, token_budget=128),
    )


class Engines:
    """A Backend over engines in this process, the next one standing by when one is lost."""

    def __init__(self, *configs: EngineConfig) -> None:
        self.verifiers = [Verifier(config) for config in configs]
        self.now = 0

    async def ready(self) -> None:
        for verifier in self.verifiers:
            while (await verifier.progress()).phase is Phase.BUILDING:
                await asyncio.sleep(0.02)

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        request = Request(
            ask.id, (1, 2, 3, 4, 5), ask.sampling, ask.speculation, emitted=ask.emitted, attempt=ask.attempt
        )
        try:
            async with aclosing(self.verifiers[self.now].generate(request, ask.stream)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if not delta.silent:
                        yield Piece(delta.text, delta.tokens, (), delta.finish, delta.statistics)
        except EngineStopped as error:
            raise PeerLost(str(error)) from error

    async def crash(self) -> None:
        verifier, self.now = self.verifiers[self.now], self.now + 1
        nonsense: Any = None
        with pytest.raises(EngineStopped, match="crashed"):
            await verifier.set_knobs(nonsense)

    async def stop(self) -> None:
        verifier, self.now = self.verifiers[self.now], self.now + 1
        await verifier.stop(0.0)

    async def card(self) -> Card:
        return Card("tiny", 1, 100)

    async def status(self) -> Any:
        return await self.verifiers[self.now].status()


@pytest.mark.timeout(300)
async def test_answers_of_a_real_model_go_on_in_other_engines(tiny_llama: Path) -> None:
    engines = Engines(
        config(tiny_llama, 0), config(tiny_llama, 4, NGRAM), config(tiny_llama, 3, LAYERS), config(tiny_llama, 0)
    )
    await engines.ready()
    backend = Failover(engines, Patience(), lambda outcome, why: None)
    told = [""] * COUNT
    counts = [0] * COUNT
    failovers = [0] * COUNT

    async def read(n: int, name: str) -> str:
        sampling = Sampling(
            60, temperature=1.0, seed=n, ignore_eos=True, presence_penalty=0.5, stop=("never said",), min_tokens=n
        )
        told[n], counts[n] = "", 0
        async with aclosing(backend.generate(Ask(f"{name}{n}", "", sampling))) as pieces:
            async for piece in pieces:
                told[n] += piece.text
                counts[n] += len(piece.tokens)
                failovers[n] = piece.statistics.failovers
                assert piece.statistics.output_tokens == counts[n]
        return told[n]

    async def begun(tokens: int) -> None:
        async with asyncio.timeout(200):
            while min(counts) < tokens:
                await asyncio.sleep(0.001)

    whole = await asyncio.gather(*(read(n, "whole") for n in range(COUNT)))
    reading = asyncio.gather(*(read(n, "cut") for n in range(COUNT)))
    await asyncio.sleep(0)
    for tokens, end in ((8, engines.crash), (20, engines.stop), (35, engines.crash)):
        await begun(tokens)
        await end()
    assert await reading == whole
    assert min(failovers) >= 2  # who was through before the last engine was lost has one less
    assert len(set(whole)) > COUNT // 2
    status = await engines.status()
    assert (status.running, status.waiting, status.blocks_owned) == (0, 0, 0)
    await engines.stop()
