"""Pauses: a sequence whose drafts keep failing drafts nothing for a while, then probes again.

Knows: for one sequence, its fruitless rounds. Refuses to know: why they were.
"""

from __future__ import annotations

from dataclasses import dataclass

#: How many rounds a sequence pauses first, and at most.
_FIRST_PAUSE = 4
_LONGEST_PAUSE = 32


@dataclass(slots=True)
class Retries:
    """After `most` rounds without one accepted draft comes a pause; it grows while probes fail.

    most: the request's own number; None: as the knobs say.
    """

    most: int | None = None
    _fruitless: int = 0
    _pause: int = _FIRST_PAUSE
    _resting: int = 0

    @property
    def resting(self) -> bool:
        return self._resting > 0

    def record(self, drafted: int, accepted: int, most: int) -> None:
        """One round. most: of the knobs."""
        if self._resting:
            self._resting -= 1
        if not drafted:
            return
        if accepted:
            self._fruitless, self._pause = 0, _FIRST_PAUSE
            return
        self._fruitless += 1
        if self._fruitless >= (self.most or most):
            self._resting = self._pause
            self._pause = min(_LONGEST_PAUSE, self._pause * 2)
