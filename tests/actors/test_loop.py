"""The loop keeps its promises whatever the engine does."""

from __future__ import annotations

import threading
import time

import pytest

from actors.loop import EngineLoop, Phase
from cluster.errors import ConfigError, EngineStopped, Overloaded
from cluster.messages import Delta, Knobs
from cluster.request import Request, Sampling
from tests.actors.fakes import FakeEngine

DEADLINE = 5.0


class Harness:
    """A loop over a fake engine, collecting what comes out."""

    def __init__(self, **options: object) -> None:
        self.engine: FakeEngine | None = None
        self.deltas: list[Delta] = []
        self.ended: list[BaseException] = []
        self.options = options
        self.gate = threading.Event()
        self.gate.set()
        self.loop = EngineLoop(self.build, self.deltas.extend, self.ended.append)

    def build(self, report: object) -> FakeEngine:
        report("loading")  # type: ignore[operator]
        assert self.gate.wait(DEADLINE)
        self.engine = FakeEngine(**self.options)  # type: ignore[arg-type]
        return self.engine

    def until(self, holds: object) -> None:
        limit = time.monotonic() + DEADLINE
        while not holds():  # type: ignore[operator]
            assert time.monotonic() < limit, "waited in vain"
            time.sleep(0.002)


@pytest.fixture
def harness(request: pytest.FixtureRequest):
    made = Harness(**getattr(request, "param", {}))
    made.loop.start()
    yield made
    made.gate.set()
    made.loop.stop(0.0)


def ask(name: str, tokens: int = 3, prompt: tuple[int, ...] = (1,)) -> Request:
    return Request(name, prompt, Sampling(max_tokens=tokens))


def test_requests_are_answered_in_full(harness: Harness) -> None:
    for name in "xyz":
        harness.loop.submit(ask(name)).result(DEADLINE)
    harness.until(lambda: sum(d.finish == "length" for d in harness.deltas) == 3)
    for name in "xyz":
        assert "".join(d.text for d in harness.deltas if d.request == name) == "abc"


def test_commands_given_while_building_run_once_built() -> None:
    harness = Harness()
    harness.gate.clear()
    harness.loop.start()
    future = harness.loop.submit(ask("x"))
    harness.until(lambda: harness.loop.progress().news == "loading")
    assert harness.loop.progress().phase is Phase.BUILDING
    assert not future.done()
    harness.gate.set()
    future.result(DEADLINE)
    harness.loop.stop(DEADLINE)
    assert harness.loop.progress().phase is Phase.STOPPED


@pytest.mark.parametrize("harness", [{"step_s": 0.02}], indirect=True)
def test_an_abort_is_in_force_before_the_next_step(harness: Harness) -> None:
    harness.loop.submit(ask("x", 10_000)).result(DEADLINE)
    harness.until(lambda: len(harness.deltas) >= 3)
    steps = harness.loop.progress().steps
    harness.loop.abort("x").result(DEADLINE)
    assert harness.engine is not None
    [(name, at)] = harness.engine.aborted
    assert name == "x"
    assert at <= steps + 1, "more than the step in progress ran before the abort"
    count = len(harness.deltas)
    time.sleep(0.1)
    assert len(harness.deltas) == count


@pytest.mark.parametrize("harness", [{"max_sequences": 1}], indirect=True)
def test_a_refusal_reaches_its_caller_and_nobody_else(harness: Harness) -> None:
    harness.loop.submit(ask("x", 10_000)).result(DEADLINE)
    with pytest.raises(Overloaded):
        harness.loop.submit(ask("y")).result(DEADLINE)
    assert harness.loop.progress().phase is Phase.RUNNING


def test_a_crash_of_the_step_ends_everything_with_an_error(harness: Harness) -> None:
    harness.loop.status().result(DEADLINE)
    assert harness.engine is not None
    harness.engine.fail_at = 7
    harness.loop.submit(ask("x", prompt=(7,)))
    harness.until(lambda: harness.ended)
    assert isinstance(harness.ended[0], EngineStopped)
    assert "planted" in str(harness.ended[0])
    assert harness.loop.progress().phase is Phase.CRASHED
    with pytest.raises(EngineStopped):
        harness.loop.submit(ask("y")).result(DEADLINE)


def test_a_failed_build_is_told_as_it_was() -> None:
    def build(_: object) -> FakeEngine:
        raise ConfigError("target.model: no such thing")

    loop = EngineLoop(build, lambda _: None, lambda _: None)
    waiting = loop.status()
    loop.start()
    with pytest.raises(ConfigError, match="no such thing"):
        waiting.result(DEADLINE)
    with pytest.raises(ConfigError):
        loop.status().result(DEADLINE)


@pytest.mark.parametrize("harness", [{"step_s": 0.3}], indirect=True)
def test_progress_tells_a_long_step_from_idleness(harness: Harness) -> None:
    harness.loop.status().result(DEADLINE)
    time.sleep(0.1)
    assert harness.loop.progress().stalled_s == 0.0
    harness.loop.submit(ask("x", 2))
    harness.until(lambda: harness.loop.progress().stalled_s > 0.15)
    harness.until(lambda: any(d.finish for d in harness.deltas))
    harness.until(lambda: harness.loop.progress().stalled_s == 0.0)


@pytest.mark.parametrize("harness", [{"step_s": 0.01}], indirect=True)
def test_stop_finishes_what_runs_and_refuses_what_comes(harness: Harness) -> None:
    harness.loop.submit(ask("x", 10)).result(DEADLINE)
    stopper = threading.Thread(target=harness.loop.stop, args=(DEADLINE,))
    stopper.start()
    time.sleep(0.03)
    with pytest.raises(EngineStopped):
        harness.loop.submit(ask("y")).result(DEADLINE)
    stopper.join(DEADLINE)
    assert harness.deltas[-1].finish == "length"
    assert len(harness.deltas) == 10


@pytest.mark.parametrize("harness", [{"step_s": 0.01}], indirect=True)
def test_stop_does_not_wait_longer_than_told(harness: Harness) -> None:
    harness.loop.submit(ask("x", 100_000)).result(DEADLINE)
    began = time.monotonic()
    harness.loop.stop(0.1)
    assert time.monotonic() - began < 2.0
    harness.until(lambda: harness.ended)


def test_knobs_reach_the_engine(harness: Harness) -> None:
    harness.loop.set_knobs(Knobs(k=2)).result(DEADLINE)
    assert harness.engine is not None
    assert harness.engine.knobs.k == 2


def test_many_threads_may_give_commands(harness: Harness) -> None:
    harness.loop.status().result(DEADLINE)
    assert harness.engine is not None
    harness.engine.max_sequences = 1000

    def give(base: int) -> None:
        for i in range(20):
            harness.loop.submit(ask(f"{base}-{i}", 2)).result(DEADLINE)

    threads = [threading.Thread(target=give, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    harness.until(lambda: sum(d.finish is not None for d in harness.deltas) == 100)
