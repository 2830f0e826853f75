"""How likely each token of an offer is to stand, from what became of earlier ones.

Knows: for each source, how often its drafts stood by place in the offer, and for each sequence how much better or
worse it fared than that.
Refuses to know: tokens, laws, step times. Only settled rounds enter (law 6).

A chain's draft j stands given those before it did with chance 1 - h_j. All sequences share the h of a source (and,
where asked, of the offer's length: a long copy is a surer one); one sequence's own is h_j * phi, phi its failures over
those expected of it, both with `_OWN` added: the mean of a Poisson rate under a gamma prior. A tree's nodes have
chances of standing at all, scaled alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.messages import Offer, PlanRow, Verdict

#: What a round's outcome is worth a round later: to everyone, and to the sequence it happened in.
_SHARED_FADE, _OWN_FADE = 0.998, 0.9
#: And what a sequence's own past is worth after a round in which nothing of it was verified.
_IDLE_FADE = 0.98
#: Chances assumed of the first place before anything is known, of a tree's next node relative to the one before,
#: and the number of tokens such assumptions, or the place before, count for.
_FIRST, _NEXT_NODE, _WEIGHT = 0.7, 0.8, 2.0
#: Rounds the shared chances count for against a sequence's own.
_OWN = 2.0
#: A new sequence starts a little better than the rest: it is tried before it is given up.
_WELCOME = 0.5
#: No failure is surer: where a draft costs nothing it is tried.
_SUREST = 0.99


@dataclass(frozen=True, slots=True)
class Kind:
    """What shares one set of chances: a source, chains or trees, and the length's bucket (0: all lengths)."""

    source: str
    tree: bool = False
    bucket: int = 0


@dataclass(slots=True)
class _Places:
    """Fading sums by place: how often a draft stood, how often it was tried."""

    stood: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)

    def add(self, outcomes: Sequence[bool]) -> None:
        missing = len(outcomes) - len(self.tried)
        self.stood += [0.0] * missing
        self.tried += [0.0] * missing
        for place, outcome in enumerate(outcomes):
            self.stood[place] = self.stood[place] * _SHARED_FADE + outcome
            self.tried[place] = self.tried[place] * _SHARED_FADE + 1.0

    def chances(self, count: int, following: float) -> list[float]:
        """Of so many places; each leans on the one before, times `following`."""
        found: list[float] = []
        before = _FIRST
        for place in range(count):
            known = place < len(self.tried)
            stood, tried = (self.stood[place], self.tried[place]) if known else (0.0, 0.0)
            found.append((stood + before * _WEIGHT) / (tried + _WEIGHT))
            before = found[-1] * following
        return found


@dataclass(slots=True)
class _Own:
    """A sequence's failures (chains) or successes (trees), and how many its kind would have had; fading."""

    seen: float
    expected: float

    def add(self, seen: float, expected: float) -> None:
        self.seen = self.seen * _OWN_FADE + seen
        self.expected = self.expected * _OWN_FADE + expected

    @property
    def factor(self) -> float:
        return (self.seen + _OWN) / (self.expected + _OWN)


class Survival:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._shared: dict[Kind, _Places] = {}
        self._own: dict[int, dict[tuple[str, bool], _Own]] = {}

    def chain(self, sequence: int, kind: Kind, count: int) -> list[float]:
        """Chances that the first j drafts all stand, j = 1 .. count."""
        phi = self._mine(sequence, kind).factor
        found: list[float] = []
        alive = 1.0
        for chance in self._places(kind).chances(count, 1.0):
            alive *= 1.0 - min(_SUREST, (1.0 - chance) * phi)
            found.append(alive)
        return found

    def tree(self, sequence: int, kind: Kind, count: int) -> list[float]:
        """Chances that each node stands, never rising from one to the next."""
        psi = self._mine(sequence, kind).factor
        found: list[float] = []
        least = 1.0
        for chance in self._places(kind).chances(count, _NEXT_NODE):
            least = min(least, chance * psi)
            found.append(least)
        return found

    def of(self, offer: Offer, kind: Kind) -> list[float]:
        """By place in the offer, never rising."""
        return (self.tree if kind.tree else self.chain)(offer.sequence, kind, len(offer.tokens))

    def settle(self, kind: Kind, row: PlanRow, verdict: Verdict) -> None:
        """One row's drafts were verified."""
        outcomes = _nodes(row, verdict) if kind.tree else _line(row, verdict)
        if not outcomes:
            return
        places = self._places(kind)
        chances = places.chances(len(outcomes), _NEXT_NODE if kind.tree else 1.0)
        if kind.tree:
            seen, expected = float(sum(outcomes)), sum(chances)
        else:
            seen, expected = float(not outcomes[-1]), sum(1.0 - chance for chance in chances)
        places.add(outcomes)
        self._mine(row.sequence, kind).add(seen, expected)

    def idle(self, sequence: int) -> None:
        """A round in which nothing of this sequence was verified: what is known of it grows old."""
        for own in self._own.get(sequence, {}).values():
            own.seen *= _IDLE_FADE
            own.expected *= _IDLE_FADE

    def forget(self, sequence: int) -> None:
        self._own.pop(sequence, None)

    def _places(self, kind: Kind) -> _Places:
        return self._shared.setdefault(kind, _Places())

    def _mine(self, sequence: int, kind: Kind) -> _Own:
        """A failure is what a new chain is spared, a success what a new tree is granted."""
        welcome = _Own(_WELCOME, 0.0) if kind.tree else _Own(0.0, _WELCOME)
        return self._own.setdefault(sequence, {}).setdefault((kind.source, kind.tree), welcome)


def _line(row: PlanRow, verdict: Verdict) -> list[bool]:
    """Of the drafts that were put to the test: those that stood, and the one that fell, if one did.

    Where the answer ended inside the drafts, those after its end were not tested.
    """
    fell = verdict.accepted < row.drafts and len(verdict.tokens) > verdict.accepted
    return [True] * verdict.accepted + [False] * fell


def _nodes(row: PlanRow, verdict: Verdict) -> list[bool]:
    path = verdict.path if verdict.path is not None else range(verdict.accepted)
    return [node in path for node in range(row.drafts)]
