"""How long a step of the target takes by how many tokens it computes.

Knows: a few sizes measured on this machine at start, and what a step costs beyond them, followed as it runs.
Refuses to know: what the tokens are for, and who decides by it.

Only ratios of these times are ever used, so a machine that is slower all round changes nothing.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.runner import Runner

#: Tokens of the steps measured, in the order of what they tell: where time runs out, the span is known first.
SIZES = (1, 64, 8, 32, 2, 16, 4, 128)
#: Each is timed so often, the fastest counts: whatever else the machine did only ever adds.
_TIMES = 3
#: No further size is measured once so much has gone into it, in seconds.
PATIENCE_S = 2.0
#: What a step seen is worth one step later, how many steps the table itself counts for, and from how
#: many times the expected time on a step was a hiccup.
_FADE, _LEAN, _HICCUP = 0.98, 1.0, 4.0
#: Sizes that differ by less say nothing of how the time rises with them.
_ALIKE = 1e-6
#: More tokens never cost less than this share of what they did when measured.
_LEAST_SCALE = 0.2


@dataclass(frozen=True, slots=True)
class StepTable:
    """Seconds of a step by its tokens; sizes rising, seconds never falling.

    Between two sizes the line through them holds; beyond the last, the line through the last two.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @staticmethod
    def of(measured: dict[int, float]) -> StepTable:
        """From at least one measurement; a larger step that was timed shorter counts as no longer."""
        sizes = tuple(sorted(measured))
        seconds: list[float] = []
        for size in sizes:
            seconds.append(max(measured[size], seconds[-1] if seconds else 0.0))
        return StepTable(sizes, tuple(seconds))

    def at(self, tokens: int) -> float:
        """Seconds a step of so many tokens takes."""
        if len(self.sizes) == 1 or tokens <= self.sizes[0]:
            return self.seconds[0]
        right = min(bisect_left(self.sizes, tokens), len(self.sizes) - 1)
        left = right - 1
        rise = (self.seconds[right] - self.seconds[left]) / (self.sizes[right] - self.sizes[left])
        return self.seconds[left] + rise * (tokens - self.sizes[left])


def measure(
    runner: Runner,
    *,
    blocks: int,
    block_tokens: int,
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTable:
    """Time steps of one row on a runner nobody uses yet; its cache may hold anything after.

    blocks: how many the cache has; sizes that do not fit are left out.
    """
    measured: dict[int, float] = {}
    began = clock()
    for size in SIZES:
        if size > blocks * block_tokens:
            continue
        if measured and clock() - began > patience_s:
            break
        measured[size] = min(_timed(runner, size, block_tokens, clock) for _ in range(_TIMES))
    return StepTable.of(measured)


def _timed(runner: Runner, size: int, block_tokens: int, clock: Callable[[], float]) -> float:
    table = tuple(range(-(-size // block_tokens)))
    plan = Plan(0, (PlanRow(0, 0, (0,) * size, table, drafts=size - 1, wants=size),), Knobs())
    began = clock()
    # Reading one number back waits for devices that compute on their own.
    float(runner.launch(plan).logits_NV[-1, 0])
    return clock() - began


class StepTimes:
    """A table as it holds now: `scale` times as slow, and `beyond` seconds more a step.

    The machine may have been busier or idler when it was measured, and a step also schedules, samples,
    writes text and attends to its context. Both numbers are the least-squares fit to the steps seen, older
    ones fading, leaning on a line through the origin: while all steps are of one size, the machine is what
    made them slower.
    """

    def __init__(self, table: StepTable) -> None:
        self._table = table
        # Sums of x x, x, 1, x y, y over steps of table time x that took y, and of y / x.
        self._sums = [0.0] * 5
        self._ratios = 0.0
        self.scale, self.beyond = 1.0, 0.0

    def at(self, tokens: int) -> float:
        """Seconds a step of so many tokens may be expected to take, all told."""
        return self.scale * self._table.at(tokens) + self.beyond

    def record(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; a hiccup counts as a step that was merely slow."""
        x, y = self._table.at(tokens), min(seconds, _HICCUP * self.at(tokens))
        fresh = (x * x, x, 1.0, x * y, y)
        self._sums = [_FADE * old + new for old, new in zip(self._sums, fresh, strict=True)]
        self._ratios = _FADE * self._ratios + y / x
        self._fit()

    def _fit(self) -> None:
        """The line through what was seen and, for `_LEAN` steps, the usual ratio at the smallest size.

        Where it would start below zero, the one through the origin.
        """
        unit = self._table.seconds[0]
        usual = (self._ratios + _LEAN) / (self._sums[2] + _LEAN)
        leaning = (unit * unit, unit, 1.0, unit * unit * usual, unit * usual)
        xx, x, n, xy, y = (seen + _LEAN * more for seen, more in zip(self._sums, leaning, strict=True))
        spread = n * xx - x * x
        scale = (n * xy - x * y) / spread if spread > _ALIKE * n * xx else usual
        beyond = (y - scale * x) / n
        if beyond < 0.0:
            scale, beyond = xy / xx, 0.0
        if scale < _LEAST_SCALE:
            scale = _LEAST_SCALE
            beyond = max(0.0, (y - scale * x) / n)
        self.scale, self.beyond = scale, beyond
