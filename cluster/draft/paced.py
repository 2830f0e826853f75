"""A proposer that drafts pass by pass, asked for no more than control allows, and timed.

Knows: how many tokens it may draft for each sequence, and what a pass has lately taken.
Refuses to know: how that number comes about, and how drafts are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cluster.draft.proposer import Proposer
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.tree import depths

#: A pass that took longer, or less, than thought moves the thought by this factor: the median is followed,
#: so that a prompt's first pass or a hiccup counts no more than any other.
_NUDGE = 1.05


class Paced:
    """Passes every verb on to `inner`.

    pass_s: seconds of a pass by its rows, where it was measured; None: the first drafts say.
    """

    def __init__(
        self,
        inner: Proposer,
        pass_s: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._inner = inner
        self._measured = pass_s
        self._clock = clock
        self._scale: float | None = None if pass_s is None else 1.0
        self._caps: Mapping[int, int] = {}
        self._met: set[int] = set()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def samples(self) -> bool:
        return self._inner.samples

    def limit(self, caps: Mapping[int, int]) -> None:
        """From the next round on, draft at most so many tokens for each sequence; those not named, as asked."""
        self._caps = caps

    def pass_s(self, rows: int) -> float | None:
        """Seconds a pass over so many rows is expected to take; None: nothing is known yet."""
        return None if self._scale is None else self._scale * (self._measured(rows) if self._measured else 1.0)

    def open(self, view: SequenceView) -> None:
        self._inner.open(view)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        asked = [_capped(view, self._caps.get(view.id, view.k)) for view in views]
        asked = [view for view in asked if view.k > 0]
        if not asked:
            return []
        began = self._clock()
        offers = self._inner.propose(asked, knobs)
        self._time(asked, offers, self._clock() - began)
        return offers

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        self._inner.settle(verdicts)

    def close(self, sequence: int) -> None:
        self._met.discard(sequence)
        self._inner.close(sequence)

    def _time(self, asked: Sequence[SequenceView], offers: Sequence[Offer], seconds: float) -> None:
        """Rounds that also read a prompt say nothing of a pass."""
        ids = {view.id for view in asked}
        met, self._met = ids <= self._met, self._met | ids
        passes = max((_passes(offer) for offer in offers), default=0)
        if not met or not passes:
            return
        took = seconds / passes / (self._measured(len(asked)) if self._measured else 1.0)
        if self._scale is None:
            self._scale = took
        else:
            self._scale *= _NUDGE if took > self._scale else 1 / _NUDGE


def _capped(view: SequenceView, most: int) -> SequenceView:
    return view if most >= view.k else replace(view, k=most)


def _passes(offer: Offer) -> int:
    return len(offer.tokens) if offer.parents is None else max(depths(offer.parents), default=0)
