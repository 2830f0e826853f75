"""What Outrider sets itself to reach against its peers, and what a run says of it.

Knows: each goal as a ratio of two sides over some cells.
Refuses to know: how turns were made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.figures import by_turn, firsts, speed
from benchmarks.peers.turns import Turn

Side = Callable[[str], bool]
Turns = Mapping[tuple[int, int], Turn]


@dataclass(frozen=True)
class Goal:
    """`over` against `under`, each the fastest of its side in each cell; first tokens: how many times as long."""

    text: str
    suite: str
    cells: tuple[str, ...]
    over: Side
    under: Side
    wanted: float
    first_tokens: bool = False  # times, where less is better


@dataclass(frozen=True)
class Verdict:
    """seen: the median over turns. loop_free: of speeds, without turns where an answer ends in a repetition."""

    goal: str
    wanted: str
    seen: float | None
    sides: str
    reached: bool | None


def _is(*names: str) -> Side:
    return lambda name: name in names


def _starts(text: str, but: str = "none") -> Side:
    return lambda name: name.startswith(text) and not name.endswith(but)


def _peer(name: str) -> bool:
    """In bfloat16: llama.cpp reads a quarter of the bytes and has goals of its own."""
    return name.startswith(("vllm", "transformers"))


_PACKED, _LLAMA = "outrider 4-bit", "llama.cpp"
_FILES = ("code x1", "chat x1", "json x1")
_NONE, _VLLM = _is("outrider none"), _is("vllm none")


def _ours_drafted(name: str) -> bool:
    return name.startswith("outrider") and not name.startswith(_PACKED) and not name.endswith("none")


GOALS = (
    Goal("one stream, without speculation, over vLLM", "smollm2", _FILES, _NONE, _VLLM, 1.25),
    Goal("batch 32, without speculation, over vLLM", "smollm2", ("mixed x32",), _NONE, _VLLM, 1.3),
    Goal("batch 64, without speculation, over vLLM", "smollm2", ("mixed x64",), _NONE, _VLLM, 1.3),
    Goal(
        "Q4_1 kept packed, without speculation, over llama.cpp",
        "smollm2",
        _FILES,
        _is(f"{_PACKED} none"),
        _is(f"{_LLAMA} none"),
        0.9,
    ),
    Goal(
        "Q4_1 kept packed, best of ours over best of llama.cpp",
        "smollm2",
        _FILES,
        lambda name: name.startswith(_PACKED),
        lambda name: name.startswith(_LLAMA),
        1.3,
    ),
    *(
        Goal(f"real pair, {cell[:4]}: drafts over none", "pair", (cell,), _ours_drafted, _NONE, wanted)
        for cell, wanted in (("json x1", 3.8), ("code x1", 3.0), ("chat x1", 1.8))
    ),
    *(
        Goal(f"real pair, {cell[:4]}: drafts over the best peer", "pair", (cell,), _ours_drafted, _peer, 1.3)
        for cell in _FILES
    ),
    Goal("first token of 2,000, to vLLM's", "smollm2", ("prompt 2000",), _NONE, _VLLM, 1.1, first_tokens=True),
)


def verdicts(turns: Sequence[Turn], goals: Sequence[Goal] = GOALS) -> list[Verdict]:
    """One for each goal of a suite that was played."""
    suites = {turn.suite for turn in turns}
    return [_verdict(goal, turns) for goal in goals if goal.suite in suites]


def _verdict(goal: Goal, turns: Sequence[Turn]) -> Verdict:
    found: list[float] = []
    sides = []
    for cell in goal.cells:
        here = [turn for turn in turns if (turn.suite, turn.cell) == (goal.suite, cell)]
        over, under = _best(here, goal.over, goal), _best(here, goal.under, goal)
        if over is None or under is None:
            continue
        found += _compared(over[1], under[1], by_turn(t for t in here if _NONE(t.contender)), goal)
        sides.append(f"{over[0]} / {under[0]}")
    wanted = f"{'<=' if goal.first_tokens else '>='} {goal.wanted:g}"
    if not found:
        return Verdict(goal.text, wanted, None, ", ".join(dict.fromkeys(sides)), None)
    seen = statistics.median(found)
    reached = seen <= goal.wanted if goal.first_tokens else seen >= goal.wanted
    return Verdict(goal.text, wanted, seen, ", ".join(dict.fromkeys(sides)), reached)


def _best(turns: Sequence[Turn], side: Side, goal: Goal) -> tuple[str, Turns] | None:
    """The fastest contender of a side by the median of its turns, with these."""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        if side(turn.contender):
            groups.setdefault(turn.contender, []).append(turn)
    if not groups:
        return None
    rate = _first_rate if goal.first_tokens else speed
    name = max(groups, key=lambda name: statistics.median(map(rate, groups[name])))
    return name, by_turn(groups[name])


def _compared(over: Turns, under: Turns, none: Turns, goal: Goal) -> list[float]:
    """Turn by turn; of two that played in different shifts, by what each is to `none` in its own."""
    rate = _first_rate if goal.first_tokens else speed
    found = [rate(turn) / rate(under[key]) for key, turn in over.items() if key in under]
    if not found:
        ours, theirs = _by_repeat(over, none, rate), _by_repeat(under, none, rate)
        found = [ours[repeat] / theirs[repeat] for repeat in ours if repeat in theirs]
    return [1.0 / ratio for ratio in found] if goal.first_tokens else found


def _by_repeat(turns: Turns, none: Turns, rate: Callable[[Turn], float]) -> dict[int, float]:
    return {key[1]: rate(turn) / rate(none[key]) for key, turn in turns.items() if key in none}


def _first_rate(turn: Turn) -> float:
    return 1.0 / firsts(turn)[0]
