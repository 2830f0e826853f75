"""The verifier as a plain object: streams, merging, aborts and health, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from actors.loop import Phase
from actors.verifier import Standing, Verifier, merge
from cluster.config import EngineConfig
from cluster.errors import EngineStopped, PeerLost, PromptTooLong
from cluster.messages import Delta, Knobs, Statistics
from cluster.model.info import ModelInfo
from cluster.request import Request, Sampling
from tests.actors.fakes import FakeEngine

INFO = ModelInfo("fake", "none", 128, 100, 1, 1, 1, "float32", "cpu", "0")


class Bench:
    """A verifier whose fake engine can be reached into."""

    def __init__(self, stall_s: float = 60.0, **options: float) -> None:
        self.engine = FakeEngine()
        self.options = options
        self.verifier = Verifier(EngineConfig(), self.build, stall_s)

    def build(self, config: EngineConfig, report: Callable[[str], None]) -> tuple[FakeEngine, Standing]:
        self.engine = FakeEngine(**self.options)  # type: ignore[arg-type]
        return self.engine, Standing(INFO)

    async def ready(self) -> None:
        async with asyncio.timeout(5):
            while (await self.verifier.progress()).phase is not Phase.RUNNING:
                await asyncio.sleep(0.005)


def ask(name: str = "x", tokens: int = 5, prompt: tuple[int, ...] = (1,)) -> Request:
    return Request(name, prompt, Sampling(max_tokens=tokens))


async def collect(chunks: AsyncIterator[Delta]) -> list[Delta]:
    async with asyncio.timeout(5):
        return [chunk async for chunk in chunks]


def run(case: Callable[[Bench], object], **options: float) -> None:
    async def whole() -> None:
        bench = Bench(**options)
        await bench.ready()
        try:
            await case(bench)  # type: ignore[misc]
        finally:
            await bench.verifier.stop(0.0)

    asyncio.run(whole())


def test_a_stream_says_everything_once_and_ends() -> None:
    async def case(bench: Bench) -> None:
        chunks = await collect(bench.verifier.generate(ask()))
        assert "".join(chunk.text for chunk in chunks) == "abcde"
        assert [chunk.finish for chunk in chunks][-1] == "length"
        assert chunks[-1].statistics.output_tokens == 5

    run(case, step_s=0.002)


def test_without_streaming_there_is_one_chunk() -> None:
    async def case(bench: Bench) -> None:
        [chunk] = await collect(bench.verifier.generate(ask(), stream=False))
        assert chunk.text == "abcde"
        assert chunk.tokens == tuple(b"abcde")

    run(case, step_s=0.002)


def test_a_slow_reader_gets_merged_chunks() -> None:
    async def case(bench: Bench) -> None:
        chunks = []
        async for chunk in bench.verifier.generate(ask(tokens=20)):
            chunks.append(chunk)
            await asyncio.sleep(0.1)
        assert len(chunks) < 5
        assert "".join(chunk.text for chunk in chunks) == "abcdefghijklmnopqrst"

    run(case, step_s=0.005)


def test_closing_the_stream_frees_the_request_at_once() -> None:
    async def case(bench: Bench) -> None:
        chunks = bench.verifier.generate(ask(tokens=10_000))
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        status = await bench.verifier.status()
        assert status.running == 0
        assert status.blocks_free == status.blocks_total
        [(name, at)] = bench.engine.aborted
        assert name == "x"
        assert status.steps <= at + 1

    run(case, step_s=0.01)


def test_cancelling_before_the_first_token_frees_the_request() -> None:
    async def case(bench: Bench) -> None:
        task = asyncio.ensure_future(collect(bench.verifier.generate(ask(tokens=10_000), stream=False)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await bench.verifier.status()).running == 0

    run(case, step_s=0.01)


def test_abort_ends_the_stream() -> None:
    async def case(bench: Bench) -> None:
        task = asyncio.ensure_future(collect(bench.verifier.generate(ask(tokens=10_000))))
        await asyncio.sleep(0.05)
        await bench.verifier.abort("x")
        assert (await asyncio.wait_for(task, 5))[-1].finish == "abort"
        await bench.verifier.abort("never heard of")

    run(case, step_s=0.01)


def test_a_refusal_is_raised_from_the_stream() -> None:
    async def case(bench: Bench) -> None:
        with pytest.raises(PromptTooLong):
            await collect(bench.verifier.generate(ask(prompt=(1,) * 101)))

    run(case)


def test_a_crash_ends_every_stream_and_health() -> None:
    async def case(bench: Bench) -> None:
        streams = [asyncio.ensure_future(collect(bench.verifier.generate(ask(name, 10_000)))) for name in "pq"]
        await asyncio.sleep(0.05)
        await bench.verifier.check_health()
        bench.engine.fail_at = 1
        for stream in streams:
            with pytest.raises(EngineStopped, match="planted"):
                await asyncio.wait_for(stream, 5)
        with pytest.raises(EngineStopped):
            await bench.verifier.check_health()
        with pytest.raises(EngineStopped):
            await collect(bench.verifier.generate(ask("r")))

    run(case, step_s=0.01)


def test_a_stuck_step_is_unhealthy_and_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.verifier.LOOK_S", 0.1)

    async def case(bench: Bench) -> None:
        stream = asyncio.ensure_future(collect(bench.verifier.generate(ask())))
        with pytest.raises(PeerLost, match="no step"):
            await stream
        with pytest.raises(PeerLost):
            await bench.verifier.check_health()

    run(case, step_s=0.8, stall_s=0.2)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_without_news_says_that_the_engine_is_well(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr("actors.verifier.LOOK_S", 0.02)

    async def case(bench: Bench) -> None:
        first = asyncio.ensure_future(collect(bench.verifier.generate(ask("x", 3), stream)))
        await asyncio.sleep(0.05)  # the next one comes while a step is under way, and waits to be taken
        chunks = await collect(bench.verifier.generate(ask("y", 3), stream))
        assert chunks[0].silent
        for told in (chunks, await first):
            assert sum(chunk.silent for chunk in told) >= 3
            assert "".join(chunk.text for chunk in told) == "abc"
            assert [chunk.finish for chunk in told if chunk.finish] == ["length"]
            assert all(chunk.request == told[0].request for chunk in told)

    run(case, step_s=0.2)


def test_an_engine_that_is_stuck_before_it_takes_a_request_gives_no_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.verifier.LOOK_S", 0.1)

    async def case(bench: Bench) -> None:
        first = asyncio.ensure_future(collect(bench.verifier.generate(ask("x"))))
        await asyncio.sleep(0.05)
        for stream in (bench.verifier.generate(ask("y")), first):
            with pytest.raises(PeerLost, match="no step"):
                await (collect(stream) if stream is not first else first)  # type: ignore[arg-type, misc]

    run(case, step_s=1.5, stall_s=0.2)


def test_knobs_and_standing() -> None:
    async def case(bench: Bench) -> None:
        await bench.verifier.set_knobs(Knobs(k=0))
        assert bench.engine.knobs.k == 0
        assert (await bench.verifier.info()).model == INFO

    run(case)


def test_merge_keeps_order_and_the_newest_statistics() -> None:
    a = Delta("x", (1,), "a", statistics=Statistics(output_tokens=1, rounds=1))
    b = Delta("x", (2, 3), "bc", finish="stop", statistics=Statistics(output_tokens=3, rounds=2))
    late = Delta("x", (), "", finish="abort")
    assert merge([a, b]) == Delta("x", (1, 2, 3), "abc", (), "stop", b.statistics)
    assert merge([a, b, late]).finish == "stop"
    assert merge([a, late]).statistics.output_tokens == 1
