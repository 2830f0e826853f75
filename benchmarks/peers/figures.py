"""Figures out of turns: speeds, first tokens, gaps, and how two contenders compare.

Knows: arithmetic over recorded turns. Ratios are taken within a turn, on the same prompts, and told by their median.
Refuses to know: engines, tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.acceptance import loops
from benchmarks.peers.turns import Turn


@dataclass(frozen=True)
class Spread:
    """The median of some values, the least, the greatest, and how many there were."""

    median: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1], len(found)) if found else None


@dataclass(frozen=True)
class Line:
    """One contender in one cell. Times in seconds; gaps between arrivals, of which one may bring several tokens.

    ratio: to the first contender's speed in the same turns. loop_free: the same without turns in which either's answer
    ends in a repetition. same: share of answers equal to the first contender's.
    """

    suite: str
    cell: str
    contender: str
    speed: Spread
    ratio: Spread | None
    loop_free: Spread | None
    first: tuple[float, float]  # median, 95th percentile
    gaps: tuple[float, float, float] | None  # median, 95th, 99th; None: everything arrived at once
    decode: float | None  # tokens a second after the first arrival
    looping: float
    same: float | None
    idle: float


def speed(turn: Turn) -> float:
    """Tokens a second, prompts included."""
    return sum(map(len, turn.answers)) / turn.seconds


def decoding(turn: Turn) -> float | None:
    """Tokens a second after every answer has begun; None where there were none."""
    begun = max(answer[0][0] for answer in turn.times)
    tokens = sum(count for answer in turn.times for at, count in answer if at > begun)
    return tokens / (turn.seconds - begun) if tokens and turn.seconds > begun else None


def firsts(turn: Turn) -> list[float]:
    return [answer[0][0] for answer in turn.times]


def gaps(turn: Turn) -> list[float]:
    return [b[0] - a[0] for answer in turn.times for a, b in pairwise(answer)]


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def lines(turns: Sequence[Turn], reference: str) -> list[Line]:
    """A line for each contender of each cell, in the order they first played."""
    groups: dict[tuple[str, str, str], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.suite, turn.cell, turn.contender), []).append(turn)
    return [_line(key, group, by_turn(groups.get((*key[:2], reference), []))) for key, group in groups.items()]


def by_turn(turns: Iterable[Turn]) -> dict[tuple[int, int], Turn]:
    return {turn.turn: turn for turn in turns}


def ratios(over: Mapping[tuple[int, int], Turn], under: Mapping[tuple[int, int], Turn]) -> list[float]:
    """Speed of `over` to speed of `under`, turn by turn, where both played."""
    return [speed(turn) / speed(under[key]) for key, turn in over.items() if key in under]


def _line(key: tuple[str, str, str], group: Sequence[Turn], reference: Mapping[tuple[int, int], Turn]) -> Line:
    mine = by_turn(group)
    straight = {key: turn for key, turn in mine.items() if not _loops(turn)}
    others = {key: turn for key, turn in reference.items() if not _loops(turn)}
    began = [second for turn in group for second in firsts(turn)]
    between = [second for turn in group for second in gaps(turn)]
    answers = [answer for turn in group for answer in turn.answers]
    compared = [
        (answer, other)
        for turn in group
        if turn.turn in reference
        for answer, other in zip(turn.answers, reference[turn.turn].answers, strict=True)
    ]
    decoded = Spread.of(rate for turn in group if (rate := decoding(turn)) is not None)
    spread = Spread.of(map(speed, group))
    assert spread is not None
    return Line(
        *key,
        speed=spread,
        ratio=Spread.of(ratios(mine, reference)),
        loop_free=Spread.of(ratios(straight, others)),
        first=(statistics.median(began), percentile(began, 0.95)),
        gaps=(statistics.median(between), percentile(between, 0.95), percentile(between, 0.99)) if between else None,
        decode=decoded.median if decoded else None,
        looping=sum(map(loops, answers)) / len(answers),
        same=sum(a == b for a, b in compared) / len(compared) if compared else None,
        idle=max(turn.idle for turn in group),
    )


def _loops(turn: Turn) -> bool:
    return any(map(loops, turn.answers))
