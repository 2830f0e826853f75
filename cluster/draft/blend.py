"""Several proposers: each row asks first the one that lately promised the most tokens a second there.

Knows: for each sequence and proposer, how many drafted tokens stood or fell in earlier rounds; what a pass of a
drafting model takes, and a step of the target.
Refuses to know: how any proposer guesses, the tokens of the round under way.

Law 6: the order follows counts of settled rounds, and exploring follows a count of rounds; neither
a draft of this round nor chance enters.

With a chance `a` that a drafted token stands given that those before it stood, j of them add a + a^2 + ... + a^j to the
one that every step brings; a proposer is as good as the best of all j up to k, over the time its passes and the step
take. Copies take none, so a model drafts where it promises so much more that its passes are worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cluster.draft.paced import Paced
from cluster.draft.proposer import Proposer
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.tree import reached

#: What a round's outcome is worth one round later.
_DECAY = 0.9

#: How many tokens the knowledge from all sequences counts for against a sequence's own.
_PRIOR_WEIGHT = 4.0
#: And the chance assumed before anything is known, with its weight: everyone is given a try.
_FIRST_GUESS, _FIRST_WEIGHT = 0.6, 2.0
_GLOBAL_DECAY = 0.99

#: Each proposer is asked first in at least one of so many rounds of a sequence.
_EXPLORE = 24


@dataclass(slots=True)
class _Record:
    """Drafted tokens that stood, of those that could have: fading sums."""

    stood: float = 0.0
    tried: float = 0.0

    def add(self, stood: int, tried: int, decay: float) -> None:
        self.stood = self.stood * decay + stood
        self.tried = self.tried * decay + tried

    def chance(self, prior: float, weight: float) -> float:
        return (self.stood + prior * weight) / (self.tried + weight)


@dataclass(slots=True)
class _Course:
    """One sequence: a record and a count of first askings a proposer, and the offer not settled yet."""

    records: list[_Record]
    asked: list[int]
    rounds: int = 0
    waiting: tuple[int, Offer] | None = None


@dataclass(slots=True)
class _Queue:
    """One row's order of proposers, and how far down it this round has come."""

    view: SequenceView
    order: list[int]
    at: int = field(default=0)

    @property
    def next(self) -> int | None:
        return self.order[self.at] if self.at < len(self.order) else None


class ExpectedOffer:
    """A combiner (proposer.py): the best expected first; who offers nothing is followed by the next best.

    step_s: seconds of the target's step for one row by the tokens it computes.
    """

    name: ClassVar[str] = "expected"
    samples: ClassVar[bool] = True

    def __init__(self, proposers: Sequence[Proposer], step_s: Callable[[int], float] = lambda _: 1.0) -> None:
        self._step_s = step_s
        self._proposers = tuple(proposers)
        self._overall = [_Record() for _ in self._proposers]
        self._courses: dict[int, _Course] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name as its method."""
        return tuple(proposer.name for proposer in self._proposers)

    def open(self, view: SequenceView) -> None:
        count = len(self._proposers)
        self._courses[view.id] = _Course([_Record() for _ in range(count)], [0] * count)
        for proposer in self._proposers:
            proposer.open(view)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        queues = [_Queue(view, self._order(view)) for view in views]
        offers: list[Offer] = []
        while queues := [queue for queue in queues if queue.next is not None]:
            for index, proposer in enumerate(self._proposers):
                asked = [queue for queue in queues if queue.next == index]
                if asked:
                    offers.extend(self._ask(index, proposer, asked, knobs))
        return offers

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            course = self._courses.get(verdict.sequence)
            if course is not None and course.waiting is not None:
                index, offer = course.waiting
                course.waiting = None
                self._record(course, index, offer, verdict)
        for proposer in self._proposers:
            proposer.settle(verdicts)

    def close(self, sequence: int) -> None:
        self._courses.pop(sequence, None)
        for proposer in self._proposers:
            proposer.close(sequence)

    def expected(self, view: SequenceView, index: int) -> float:
        """Tokens a second that proposer `index` may be expected to bring a row, from settled rounds."""
        overall = self._overall[index].chance(_FIRST_GUESS, _FIRST_WEIGHT)
        chance = self._courses[view.id].records[index].chance(overall, _PRIOR_WEIGHT)
        proposer = self._proposers[index]
        pass_s = (proposer.pass_s(1) or 0.0) if isinstance(proposer, Paced) else 0.0
        best, tokens = 0.0, 1.0
        for length in range(1, view.k + 1):
            tokens += chance**length
            best = max(best, tokens / (self._step_s(1 + length) + length * pass_s))
        return best

    def _order(self, view: SequenceView) -> list[int]:
        """Indices of proposers, the one to ask first first; equals stay in the order configured."""
        allowed = [n for n, proposer in enumerate(self._proposers) if view.method in (None, proposer.name)]
        if not allowed:
            return []
        course = self._courses[view.id]
        course.waiting = None  # whatever was offered last round has been settled or never will be
        course.rounds += 1
        order = sorted(allowed, key=lambda index: -self.expected(view, index))
        rarest = min(allowed, key=lambda index: course.asked[index])
        if course.asked[rarest] * _EXPLORE < course.rounds - 1:
            order.remove(rarest)
            order.insert(0, rarest)
        course.asked[order[0]] += 1
        return order

    def _ask(self, index: int, proposer: Proposer, asked: Sequence[_Queue], knobs: Knobs) -> list[Offer]:
        """Offers of one proposer; rows it served are done, the others go on to their next."""
        made = proposer.propose([queue.view for queue in asked], knobs)
        served = {offer.sequence: offer for offer in made}
        for queue in asked:
            offer = served.get(queue.view.id)
            queue.at = len(queue.order) if offer is not None else queue.at + 1
            if offer is not None:
                self._courses[queue.view.id].waiting = (index, offer)
        return made

    def _record(self, course: _Course, index: int, offer: Offer, verdict: Verdict) -> None:
        """Count what stood, and the one that fell, if one did.

        Drafts the scheduler cut off, or an answer that ended, say nothing about the token after
        those that stood: it fell only where the target put another in its place.
        """
        stood = verdict.accepted
        foretold, more = reached(offer.tokens, offer.parents or range(-1, len(offer.tokens) - 1), verdict.tokens)
        fell = more and foretold == stood
        if stood or fell:
            course.records[index].add(stood, stood + fell, _DECAY)
            self._overall[index].add(stood, stood + fell, _GLOBAL_DECAY)
