"""How many tokens to draft and to verify for each sequence: as many as raise the tokens a second.

Knows: the knobs, what became of each sequence's earlier drafts, how long steps and drafting passes take.
Refuses to know: tokens and laws.

Two decisions a step. Before drafting: how many passes a drafting model makes. After: which of the offered drafts are
verified. Both follow lagged statistics (law 6). The second also sees which rows were offered drafts, and how many: it
leaves offers that carry the law they were sampled from as they are, since their length might depend on their tokens.
Under load a token more costs a step more, and both numbers fall to 0; a probe now and then finds out when they should
rise again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from cluster.control.goodput import Choice, choose, choose_depth
from cluster.control.retries import Retries
from cluster.control.steptime import StepTable, StepTimes
from cluster.control.survival import Kind, Survival
from cluster.draft.paced import Paced
from cluster.messages import Knobs, Load, Offer, Plan, PlanRow, Verdict

#: Numbers of passes that are weighed: a finer grid changes rates by less than they are known.
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
#: One sequence's offer is verified whatever it promises every so many steps in which all of its were left out; and
#: one sequence has a model draft for it every so many in which that never paid.
_PROBE, _MODEL_PROBE, _PROBE_TOKENS = 16, 64, 4
#: And no model drafts in one round of so many, where it pays: what a plain step takes must be seen to be known.
_PLAIN = 48
#: What a step takes before anything was measured: any drafts are worth it then.
_FLAT = StepTable((1,), (1.0,))


@dataclass(slots=True)
class _Course:
    """One sequence: its pauses, the rounds since a draft of it was verified, and the offer under way."""

    retries: Retries
    idle: int = 0
    kind: Kind | None = None


class LengthControl:
    """Owns the knobs. `set` replaces what the operator decides; what is drafted follows what is observed.

    times: of the target's steps. paced: proposers that draft pass by pass.
    """

    def __init__(self, knobs: Knobs, times: StepTimes | None = None, paced: Sequence[Paced] = ()) -> None:
        self.knobs = knobs
        self._times = times or StepTimes(_FLAT)
        self._paced = tuple(paced)
        self._survival = Survival()
        self._courses: dict[int, _Course] = {}
        self._left_out = 0
        self._unpaid: dict[str, int] = {proposer.name: 0 for proposer in paced}
        self._paying = 0

    def set(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self._pause()
        if not knobs.adaptive:
            for proposer in self._paced:
                proposer.limit({})

    def open(self, sequence: int, max_retries: int | None) -> None:
        """A sequence that was promised its own number of retries; None leaves it to the knobs."""
        self._courses[sequence] = _Course(Retries(max_retries))

    def trim(self, offers: Sequence[Offer], load: Load) -> list[Offer]:
        """Those parts of the offers that are worth verifying in a step that does `load` beside them."""
        for offer in offers:
            self._course(offer.sequence).kind = self._kind(offer)
        if not self.knobs.adaptive:
            return list(offers)
        fixed = [offer for offer in offers if offer.law is not None]
        free = [offer for offer in offers if offer.law is None]
        drawn = sum(len(offer.tokens) for offer in fixed)
        made = choose(
            [self._survival.of(offer, self._kind(offer)) for offer in free],
            Load(max(1, load.rows), load.tokens + drawn),
            self._times.at,
        )
        counts = self._probed(free, made.counts)
        return fixed + [_start(offer, count) for offer, count in zip(free, counts, strict=True) if count]

    def update(self, plan: Plan, verdicts: Sequence[Verdict], seconds: float | None = None) -> Knobs:
        """Take one step's outcome in; returns the knobs of the next. seconds: what the step took, drafting apart."""
        if seconds is not None:
            self._times.record(plan.num_tokens, seconds)
        rows = {row.sequence: row for row in plan.rows}
        for verdict in verdicts:
            self._settle(rows[verdict.sequence], verdict)
        self._pause()
        if self.knobs.adaptive and self._paced:
            known = sum(len(row.tokens) - row.drafts for row in plan.rows)
            self._pace([verdict.sequence for verdict in verdicts], Load(len(verdicts), known))
        return self.knobs

    def forget(self, sequences: Iterable[int]) -> None:
        """These sequences ended."""
        for sequence in sequences:
            self._courses.pop(sequence, None)
            self._survival.forget(sequence)

    def _course(self, sequence: int) -> _Course:
        return self._courses.setdefault(sequence, _Course(Retries()))

    def _kind(self, offer: Offer) -> Kind:
        """A copy is the surer the longer it is; how long a model drafts was decided here."""
        bucket = 0 if offer.source in self._unpaid or offer.law is not None else len(offer.tokens).bit_length()
        return Kind(offer.source, offer.parents is not None, bucket)

    def _settle(self, row: PlanRow, verdict: Verdict) -> None:
        course = self._course(row.sequence)
        course.retries.record(row.depth, verdict.accepted, self.knobs.max_retries)
        if row.drafts and course.kind is not None:
            self._survival.settle(course.kind, row, verdict)
            course.idle = 0
        else:
            self._survival.idle(row.sequence)
            course.idle += 1
        course.kind = None

    def _pause(self) -> None:
        resting = (sequence for sequence, course in self._courses.items() if course.retries.resting)
        self.knobs = replace(self.knobs, caps=MappingProxyType(dict.fromkeys(resting, 0)))

    def _probed(self, offers: Sequence[Offer], counts: Sequence[int]) -> Sequence[int]:
        """Now and then, where nothing was worth it, a little of one sequence's offer: of who waited longest."""
        if not offers or any(counts):
            self._left_out = 0
            return counts
        self._left_out += 1
        if self._left_out < _PROBE:
            return counts
        self._left_out = 0
        longest = max(range(len(offers)), key=lambda at: self._course(offers[at].sequence).idle)
        return [_PROBE_TOKENS if at == longest else 0 for at in range(len(offers))]

    def _pace(self, sequences: Sequence[int], load: Load) -> None:
        """How far each drafting model goes in the next round."""
        if not sequences:
            return
        plain = self._paying >= _PLAIN
        for proposer in self._paced:
            pass_s = proposer.pass_s(len(sequences))
            if plain:
                proposer.limit(dict.fromkeys(sequences, 0))
            elif pass_s is not None:
                depth, choice = self._weighed(proposer.name, sequences, load, pass_s)
                proposer.limit(self._paces(proposer.name, sequences, depth, choice))
        self._paying = 0 if plain else self._paying + all(not count for count in self._unpaid.values())

    def _weighed(self, name: str, sequences: Sequence[int], load: Load, pass_s: float) -> tuple[int, Choice]:
        depths = [depth for depth in _DEPTHS if depth < self.knobs.k] + [self.knobs.k] * (self.knobs.k > 0)
        chances = [self._survival.chain(sequence, Kind(name), self.knobs.k) for sequence in sequences]
        return choose_depth(chances, load, self._times.at, pass_s, depths)

    def _paces(self, name: str, sequences: Sequence[int], depth: int, choice: Choice) -> Mapping[int, int]:
        caps = dict(zip(sequences, choice.counts, strict=True))
        self._unpaid[name] = 0 if depth else self._unpaid[name] + 1
        if self._unpaid[name] >= _MODEL_PROBE:
            self._unpaid[name] = 0
            caps[max(sequences, key=lambda sequence: self._course(sequence).idle)] = _PROBE_TOKENS
        return caps


def _start(offer: Offer, count: int) -> Offer:
    """The first `count` drafts; of a tree, nodes, each of which comes after its parent."""
    if count >= len(offer.tokens):
        return offer
    parents = None if offer.parents is None else offer.parents[:count]
    return replace(offer, tokens=offer.tokens[:count], parents=parents)
