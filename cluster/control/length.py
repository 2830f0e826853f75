"""How many tokens to draft for each sequence, from what became of its earlier drafts.

Knows: for each live sequence, its last rounds' drafted and accepted counts.
Refuses to know: tokens, laws, step times.

Only lagged counts enter, so whether a draft token is verified never depends on its value (law 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType

from cluster.messages import Knobs, Plan, Verdict

#: Rounds without one accepted draft after which a sequence pauses, and how long it pauses first.
_FRUITLESS_ROUNDS = 3
_FIRST_PAUSE = 4
_LONGEST_PAUSE = 32


class _Course:
    """One sequence's draft length: doubles while all is accepted, falls to what was accepted + 1.

    After some fruitless rounds it drafts nothing for a while, then probes again; the pause grows
    while probes fail.
    """

    def __init__(self, k: int) -> None:
        self.k = max(1, k)  # from 0 it could never grow, were speculation switched on later
        self._fruitless = 0
        self._pause = _FIRST_PAUSE
        self._resting = 0

    @property
    def cap(self) -> int:
        return 0 if self._resting else self.k

    def record(self, drafted: int, accepted: int, k: int) -> None:
        if self._resting:
            self._resting -= 1
        if not drafted:
            return
        if accepted == drafted:
            self.k = min(k, max(1, self.k) * 2)
        else:
            self.k = min(k, accepted + 1)
        if accepted:
            self._fruitless, self._pause = 0, _FIRST_PAUSE
            return
        self._fruitless += 1
        if self._fruitless >= _FRUITLESS_ROUNDS:
            self._resting = self._pause
            self._pause = min(_LONGEST_PAUSE, self._pause * 2)


class LengthControl:
    """Owns the knobs. `set` replaces what the operator decides; caps follow what is observed."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self._courses: dict[int, _Course] = {}

    def set(self, knobs: Knobs) -> None:
        self.knobs = replace(knobs, caps=self.knobs.caps if knobs.adaptive else MappingProxyType({}))

    def update(self, plan: Plan, verdicts: Sequence[Verdict]) -> Knobs:
        """Take one step's outcome in; returns the knobs of the next."""
        if not self.knobs.adaptive:
            return self.knobs
        drafted = {row.sequence: row.drafts for row in plan.rows if row.wants}
        for verdict in verdicts:
            course = self._courses.setdefault(verdict.sequence, _Course(self.knobs.k))
            course.record(drafted[verdict.sequence], verdict.accepted, self.knobs.k)
        caps = MappingProxyType({sequence: course.cap for sequence, course in self._courses.items()})
        self.knobs = replace(self.knobs, caps=caps)
        return self.knobs

    def forget(self, sequences: Iterable[int]) -> None:
        """These sequences ended."""
        for sequence in sequences:
            self._courses.pop(sequence, None)
