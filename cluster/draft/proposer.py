"""The protocol every proposer of draft tokens follows.

Knows: the four verbs and what each promises.
Refuses to know: models, tries, devices, and whether the proposer runs here or behind a channel:
the verbs are also the wire messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.messages import Knobs, Offer, SequenceView, Verdict


class Proposer(Protocol):
    """Guesses the next tokens of sequences it is shown; never touches a sequence.

    Offers may be wrong, missing, late or repeated: that costs speed, never a token.
    """

    @property
    def name(self) -> str:
        """What a request names it by; the source its offers give."""

    @property
    def samples(self) -> bool:
        """True when draft tokens are sampled, so that `ratio` needs the law in the offer."""

    def open(self, view: SequenceView) -> None:
        """A sequence will be shown to `propose`. May be called again after preemption."""

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        """Offers for some of `views`: at most one a view, at most `view.k` tokens long."""

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        """Learn what became of the offers of the last round."""

    def close(self, sequence: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""


class Combiner(Proposer, Protocol):
    """A proposer made of others; at most one of them answers a row."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name as its method."""
