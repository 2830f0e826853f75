"""Several proposers, in order: each row takes the first offer made for it.

Knows: the order, and which proposer a request asked for by name.
Refuses to know: how any of them guesses, and whether the guesses are good.

Which proposer answers depends on tokens already known, never on the value of a sampled draft
(law 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cluster.draft.proposer import Proposer
from cluster.messages import Knobs, Offer, SequenceView, Verdict


class FirstOffer:
    """A proposer made of proposers; with none it never offers anything."""

    name: ClassVar[str] = "first"
    samples: ClassVar[bool] = True

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = tuple(proposers)

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name as its method."""
        return tuple(proposer.name for proposer in self._proposers)

    def open(self, view: SequenceView) -> None:
        for proposer in self._proposers:
            proposer.open(view)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        offers: list[Offer] = []
        left = list(views)
        for proposer in self._proposers:
            asked = [view for view in left if view.method in (None, proposer.name)]
            if asked:
                made = proposer.propose(asked, knobs)
                served = {offer.sequence for offer in made}
                offers.extend(made)
                left = [view for view in left if view.id not in served]
        return offers

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        for proposer in self._proposers:
            proposer.settle(verdicts)

    def close(self, sequence: int) -> None:
        for proposer in self._proposers:
            proposer.close(sequence)
