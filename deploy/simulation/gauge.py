"""Times the proposer of an engine without changing what it says.

Knows: when a round's questions were asked and answered, and how many got an answer.
Refuses to know: who drafts, and where.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cluster.draft.proposer import Combiner
from cluster.messages import Knobs, Offer, SequenceView, Verdict


@dataclass(slots=True)
class Reading:
    """One round: rows that could carry a draft, rows that got one, seconds spent with the proposer."""

    asked: int = 0
    offered: int = 0
    seconds: float = 0.0


class Gauge:
    """A proposer (proposer.py) around another."""

    name: ClassVar[str] = "gauge"
    samples: ClassVar[bool] = True

    def __init__(self, inner: Combiner) -> None:
        self._inner = inner
        self._reading = Reading()

    @property
    def names(self) -> tuple[str, ...]:
        return self._inner.names

    def open(self, view: SequenceView) -> None:
        self._inner.open(view)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        began = time.perf_counter()
        offers = self._inner.propose(views, knobs)
        self._reading.seconds += time.perf_counter() - began
        self._reading.asked += len(views)
        self._reading.offered += sum(1 for offer in offers if offer.tokens)
        return offers

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        began = time.perf_counter()
        self._inner.settle(verdicts)
        self._reading.seconds += time.perf_counter() - began

    def close(self, sequence: int) -> None:
        self._inner.close(sequence)

    def take(self) -> Reading:
        """What was read since the last call."""
        reading, self._reading = self._reading, Reading()
        return reading
