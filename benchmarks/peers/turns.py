"""Turns: every contender answers the same prompts, one computing at a time, until the time is over.

Knows: who is loaded together, in which order they take a turn, when to begin no other, who is out.
Refuses to know: what the figures say (figures.py), how a process is driven (process.py).

Whoever waits is stopped, so that no engine polls while another computes. Where memory does not hold everyone at once
they come in shifts; the first contender's process stays through all of them, so that each is compared with it in the
same minutes.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.cells import Cell, Prompts
from benchmarks.peers.contenders import Contender
from benchmarks.peers.process import EngineLost, EngineProcess

_WARM_TOKENS = 8


@dataclass(frozen=True)
class Turn:
    """One contender's answers in one turn of a cell.

    turn: equal for contenders that are compared (shift, repeat). answers: token ids. times: of each answer the arrivals
    (seconds, tokens). seconds: until the last. idle: the largest share of a core that a waiting process used meanwhile.
    """

    suite: str
    cell: str
    turn: tuple[int, int]
    contender: str
    answers: tuple[tuple[int, ...], ...]
    times: tuple[tuple[tuple[float, int], ...], ...]
    seconds: float
    idle: float = 0.0


@dataclass
class Standing:
    """Of one suite: what is known of each contender beside its turns. Filled by `Match`, nobody else writes."""

    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)  # who is out, and why


class Match:
    """The contenders of one suite against each other."""

    def __init__(
        self,
        suite: str,
        contenders: Sequence[Contender],
        prompts: Prompts,
        end: Sequence[int],
        *,
        open_process: Callable[[Contender], EngineProcess],
        room_for_one: Callable[[], bool],
        note: Callable[[Turn], None],
        progress: Callable[[str], None],
    ) -> None:
        self._suite = suite
        self._all, self._left = tuple(contenders), list(contenders)
        self._first = contenders[0].process
        self._prompts = prompts
        self._end = list(end)
        self._open, self._room_for_one = open_process, room_for_one
        self._note, self._progress = note, progress
        self._loaded: dict[str, EngineProcess] = {}
        self.standing = Standing()

    def play(self, cells: Sequence[Cell], repeats: int, until: float) -> None:
        """All shifts; begins no turn after `until` (monotonic seconds). Leaves no process behind."""
        shift = 0
        try:
            while self._left and (shift == 0 or time.monotonic() < until):
                before = len(self._left)
                here = self._load()
                shifts = 1 + math.ceil(len(self._left) / (before - len(self._left)))
                self._shift(shift, here, cells, repeats, time.monotonic() + (until - time.monotonic()) / shifts)
                self._measure_memory(here)
                self._close(keep=self._first if self._left else None)
                shift += 1
            for contender in self._left:
                self.standing.out.setdefault(contender.name, "the time was over before its turn: raise --minutes")
        finally:
            self._close(keep=None)

    def _load(self) -> list[Contender]:
        """Load who is left, in order, as memory allows; returns everyone whose process is loaded."""
        waiting = []
        for contender in self._left:
            if contender.process in self._loaded or contender.name in self.standing.out:
                continue
            if self._loaded and not self._room_for_one():
                waiting.append(contender)
            else:
                self._start(contender)
        if waiting == self._left:  # nothing but the one that stays is loaded, and there is still no room
            self.standing.out |= {c.name: "too little memory beside the first contender" for c in waiting}
            waiting = []
        self._left = waiting
        return [contender for contender in self._all if contender.process in self._loaded]

    def _start(self, contender: Contender) -> None:
        began = time.monotonic()
        try:
            process = self._open(contender)
            self._loaded[contender.process] = process
            self.standing.versions[contender.peer] = process.load(contender.settings)
            warm = {"prompts": [self._prompts.warm], "tokens": _WARM_TOKENS, "end": self._end, "whole": True}
            process.run(**{**warm, **contender.ask})
        except EngineLost as lost:
            self._drop(contender.process, str(lost))
        else:
            process.pause()
            self._progress(f"{self._suite}: {contender.name} is loaded, {time.monotonic() - began:.0f} s")

    def _shift(self, shift: int, here: Sequence[Contender], cells: Sequence[Cell], repeats: int, until: float) -> None:
        took: dict[str, float] = {}
        for repeat in range(repeats):
            for cell in cells:
                takers = [c for c in here if cell.takes(c) and c.process in self._loaded]
                if not takers or (took and time.monotonic() + took.get(cell.name, 0.0) > until):
                    continue  # but every shift has one cell at least, however long loading took
                began = time.monotonic()
                for contender in _ordered(takers, f"{cell.name} {repeat}"):
                    self._turn(contender, cell, (shift, repeat))
                took[cell.name] = time.monotonic() - began
                self._progress(f"{self._suite}: {cell.name}, turn {repeat + 1}: {took[cell.name]:.0f} s")

    def _turn(self, contender: Contender, cell: Cell, turn: tuple[int, int]) -> None:
        process = self._loaded.get(contender.process)
        if process is None:  # it was lost in this very turn, by another contender it serves
            return
        process.resume()
        others = {name: other.cpu_s() for name, other in self._loaded.items() if other is not process}
        asked = {"tokens": cell.tokens, "end": self._end, "whole": cell.whole, **contender.ask, **cell.ask}
        began = time.monotonic()
        try:
            answer = process.run(prompts=self._prompts.of(cell, turn[1]), **asked)
        except EngineLost as lost:
            self._drop(contender.process, str(lost))
            return
        process.pause()
        elapsed = time.monotonic() - began
        idle = max((self._loaded[name].cpu_s() - used for name, used in others.items()), default=0.0) / elapsed
        self._note(_turn_of(self._suite, cell, turn, contender, answer, idle))

    def _measure_memory(self, here: Sequence[Contender]) -> None:
        for contender in here:
            process = self._loaded.get(contender.process)
            if process is not None:
                process.resume()
                self.standing.memory[contender.name] = process.memory()
                process.pause()

    def _drop(self, process: str, why: str) -> None:
        for contender in self._all:
            if contender.process == process:
                self.standing.out[contender.name] = why
                self._progress(f"{self._suite}: {contender.name} is out: {why}")
        if (lost := self._loaded.pop(process, None)) is not None:
            lost.close()

    def _close(self, keep: str | None) -> None:
        for name in [name for name in self._loaded if name != keep]:
            self._loaded.pop(name).close()


def _turn_of(
    suite: str, cell: Cell, turn: tuple[int, int], contender: Contender, answer: Mapping[str, Any], idle: float
) -> Turn:
    return Turn(
        suite,
        cell.name,
        turn,
        contender.name,
        tuple(tuple(one["tokens"]) for one in answer["answers"]),
        tuple(tuple((float(at), int(count)) for at, count in one["times"]) for one in answer["answers"]),
        float(answer["seconds"]),
        round(idle, 4),
    )


def _ordered(contenders: Sequence[Contender], salt: str) -> Iterator[Contender]:
    """No one is always first."""
    yield from sorted(
        contenders, key=lambda contender: (zlib.crc32(f"{salt} {contender.name}".encode()), contender.name)
    )
