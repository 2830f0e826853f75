"""Runs an engine of emulated devices for a while and reads off what it did.

Knows: how to keep a batch running, and what each round's wall time was spent on.
Refuses to know: what was expected.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.engine import Engine
from cluster.errors import BrokenInvariant
from cluster.model.emulated import EmulatedRunner, Script
from cluster.request import Request, Sampling
from deploy.simulation.drafters import Drafters
from deploy.simulation.gauge import Gauge
from deploy.simulation.scenario import PROMPT

#: Rounds after the last prompt is in that are not measured: proposers settle down.
_WARM_UP = 4
#: How long the prompts may take, in seconds.
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Running:
    """An engine on emulated devices, and where it can be read."""

    engine: Engine
    script: Script
    ranks_LP: npt.NDArray[np.int64]  # of the script's tokens in the draft's eyes
    target: EmulatedRunner
    gauge: Gauge
    drafters: Drafters | None = None  # where they have processes of their own


@dataclass(frozen=True, slots=True)
class Round:
    """One step of the engine. `at_s`: its end, from the beginning of the measurement.

    Of `step_s` wall seconds the target's table asked for `target_s`, it took `late_s` longer (waking up), `draft_s`
    were spent with the proposer; the rest is the engine's own.
    rows: sequences that emitted tokens; of `asked` that could carry drafts `offered` did.
    """

    at_s: float
    step_s: float
    target_s: float
    late_s: float
    draft_s: float
    rows: int
    tokens: int
    asked: int
    offered: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a batch did. Times are milliseconds, means over rounds unless said otherwise.

    tokens: a row and round, the target's own included. hit: share of rows that carried a draft where they could.
    plane_ms: median time with the proposer, over rounds in which every row got its draft: where drafts are made ahead,
    what it costs to hand outcomes over and offers back.
    """

    tokens_s: float
    tokens: float
    hit: float
    rounds: int
    round_ms: float
    target_ms: float
    late_ms: float
    draft_ms: float
    engine_ms: float
    plane_ms: float

    @staticmethod
    def of(rounds: Sequence[Round]) -> Measurement:
        count = len(rounds)
        wall_s = sum(r.step_s for r in rounds)
        asked = sum(r.asked for r in rounds)

        def mean_ms(values: Sequence[float]) -> float:
            return 1e3 * sum(values) / count

        target, late, draft = ([getattr(r, name) for r in rounds] for name in ("target_s", "late_s", "draft_s"))
        full = [r.draft_s for r in rounds if r.asked and r.offered == r.asked]
        return Measurement(
            tokens_s=sum(r.tokens for r in rounds) / wall_s,
            tokens=sum(r.tokens for r in rounds) / sum(r.rows for r in rounds),
            hit=sum(r.offered for r in rounds) / asked if asked else 0.0,
            rounds=count,
            round_ms=1e3 * wall_s / count,
            target_ms=mean_ms(target),
            late_ms=mean_ms(late),
            draft_ms=mean_ms(draft),
            engine_ms=1e3 * (wall_s - sum(target) - sum(late) - sum(draft)) / count,
            plane_ms=1e3 * statistics.median(full) if full else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Course:
    """The measured rounds, and the part of its text that each lane said in them, while its drafters lived."""

    rounds: list[Round]
    spans: tuple[slice, ...]


def measure(running: Running, batch: int, seconds: float, kill_at: float | None = None) -> Course:
    """The rounds of `batch` sequences side by side, over `seconds`; after `kill_at` of them the drafters are killed.

    Raises BrokenInvariant when an answer is not the target's own text.
    """
    engine, script = running.engine, running.script
    answers: dict[str, list[int]] = {}
    for lane in range(batch):
        answers[str(lane)] = []
        length = Sampling(max_tokens=script.length, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(lane), script.prompt(lane, PROMPT), length))
    _start(running, answers)
    starts = _places(answers)
    ends = None
    began = time.perf_counter()
    rounds: list[Round] = []
    while not rounds or rounds[-1].at_s < seconds:
        rounds.append(_round(running, answers, began))
        if kill_at is not None and running.drafters is not None and rounds[-1].at_s >= kill_at:
            running.drafters.kill()
            kill_at, ends = None, _places(answers)
        if rounds[-1].rows < batch:
            raise BrokenInvariant(f"{batch - rounds[-1].rows} sequences of {batch} did not decode")
    ends = ends or _places(answers)
    for lane in range(batch):
        engine.abort(str(lane))
        said = answers[str(lane)]
        if tuple(said) != script.answer(lane, PROMPT, len(said)):
            raise BrokenInvariant(f"sequence {lane} does not say what the target says")
    engine.check()
    return Course(rounds, tuple(slice(*span) for span in zip(starts, ends, strict=True)))


def _places(answers: Mapping[str, Sequence[int]]) -> list[int]:
    """Where in its text each lane is."""
    return [PROMPT + len(answer) for answer in answers.values()]


def _start(running: Running, answers: dict[str, list[int]]) -> None:
    """Prompts, and a few rounds more."""
    deadline = time.perf_counter() + _START_S
    warm = 0
    while warm < _WARM_UP:
        if time.perf_counter() > deadline:
            raise BrokenInvariant(f"not every sequence emitted tokens within {_START_S:.0f} s")
        _round(running, answers, 0.0)
        warm += all(answers.values())


def _round(running: Running, answers: dict[str, list[int]], origin: float) -> Round:
    meter = running.target.meter
    set_s, late_s = meter.set_s, meter.late_s
    began = time.perf_counter()
    deltas = running.engine.step()
    ended = time.perf_counter()
    for delta in deltas:
        answers[delta.request].extend(delta.tokens)
    reading = running.gauge.take()
    return Round(
        at_s=ended - origin,
        step_s=ended - began,
        target_s=meter.set_s - set_s,
        late_s=meter.late_s - late_s,
        draft_s=reading.seconds,
        rows=len(deltas),
        tokens=sum(len(delta.tokens) for delta in deltas),
        asked=reading.asked,
        offered=reading.offered,
    )
