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

#: How many rounds a sequence pauses first, and at most.
_FIRST_PAUSE = 4
_LONGEST_PAUSE = 32


class _Course:
    """One sequence's draft length: doubles while all is accepted, falls to what was accepted + 1.

    After `max_retries` rounds without one accepted draft it drafts nothing for a while, then probes
    again; the pause grows while probes fail.
    """

    def __init__(self, k: int, max_retries: int | None = None) -> None:
        self.k = max(1, k)  # from 0 it could never grow, were speculation switched on later
        self.max_retries = max_retries  # the request's own; None: as the knobs say
        self._fruitless = 0
        self._pause = _FIRST_PAUSE
        self._resting = 0

    @property
    def resting(self) -> bool:
        return self._resting > 0

    def record(self, drafted: int, accepted: int, knobs: Knobs) -> None:
        if self._resting:
            self._resting -= 1
        if not drafted:
            return
        if accepted == drafted:
            self.k = min(knobs.k, max(1, self.k) * 2)
        else:
            self.k = min(knobs.k, accepted + 1)
        if accepted:
            self._fruitless, self._pause = 0, _FIRST_PAUSE
            return
        self._fruitless += 1
        if self._fruitless >= (self.max_retries or knobs.max_retries):
            self._resting = self._pause
            self._pause = min(_LONGEST_PAUSE, self._pause * 2)


class LengthControl:
    """Owns the knobs. `set` replaces what the operator decides; caps follow what is observed."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self._courses: dict[int, _Course] = {}

    def set(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self._spread()

    def open(self, sequence: int, max_retries: int | None) -> None:
        """A sequence that was promised its own number of retries; None leaves it to the knobs."""
        self._courses[sequence] = _Course(self.knobs.k, max_retries)

    def update(self, plan: Plan, verdicts: Sequence[Verdict]) -> Knobs:
        """Take one step's outcome in; returns the knobs of the next."""
        drafted = {row.sequence: row.depth for row in plan.rows if row.wants}
        for verdict in verdicts:
            course = self._courses.setdefault(verdict.sequence, _Course(self.knobs.k))
            course.record(drafted[verdict.sequence], verdict.accepted, self.knobs)
        self._spread()
        return self.knobs

    def _spread(self) -> None:
        """Put what the courses say into the knobs: pauses always, lengths where control is adaptive."""
        caps = {
            sequence: 0 if course.resting else course.k
            for sequence, course in self._courses.items()
            if self.knobs.adaptive or course.resting
        }
        self.knobs = replace(self.knobs, caps=MappingProxyType(caps))

    def forget(self, sequences: Iterable[int]) -> None:
        """These sequences ended."""
        for sequence in sequences:
            self._courses.pop(sequence, None)
