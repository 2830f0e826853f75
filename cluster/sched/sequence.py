"""A request on its way: the scheduler's own record, seen by others only as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.messages import Knobs, PlanRow, SequenceView, SourceCount, Statistics, Verdict
from cluster.request import Request, RuleName


@dataclass(slots=True)
class Tally:
    """Running totals behind `Statistics`."""

    cached_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    by_source: dict[str, SourceCount] = field(default_factory=dict)
    rule: RuleName = "coupled"
    lossy: bool = False

    def record(self, row: PlanRow, verdict: Verdict) -> None:
        drafted, accepted = row.drafts, verdict.accepted
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.rule = verdict.rule
        self.lossy |= verdict.lossy
        if row.offer is not None:
            source = row.offer.source
            before = self.by_source.get(source, SourceCount(source, 0, 0))
            self.by_source[source] = SourceCount(source, before.drafted + drafted, before.accepted + accepted)
        while len(self.drafted_by_position) < row.depth:
            self.drafted_by_position.append(0)
            self.accepted_by_position.append(0)
        for position in range(row.depth):
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens known and how many of them are in the cache. Written by the scheduler alone."""

    id: int
    request: Request
    tokens: list[int]
    computed_len: int = 0
    tally: Tally = field(default_factory=Tally)
    admitted_before: bool = False

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Known tokens not yet computed; 1 means ready to decode."""
        return len(self.tokens) - self.computed_len

    @property
    def untold(self) -> int:
        """Leading positions whose logits say something of prompt tokens, while that is wanted and not yet reported."""
        wanted = self.request.sampling.prompt_logprobs is not None and len(self.tokens) == self.prompt_len
        return self.prompt_len - 1 if wanted else 0

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.sampling.max_tokens - (len(self.tokens) - self.prompt_len)

    def view(self, knobs: Knobs, nodes: int = 0) -> SequenceView:
        """nodes: how many a tree may have."""
        speculation = self.request.speculation
        limits = [knobs.caps.get(self.id, knobs.k), knobs.k, self.room - 1]
        if speculation.k is not None:
            limits.append(speculation.k)
        return SequenceView(
            id=self.id,
            tokens=self.tokens,
            prompt_len=self.prompt_len,
            computed_len=self.computed_len,
            sampling=self.request.sampling,
            rule=speculation.rule or knobs.rule,
            salt=self.request.salt,
            method=speculation.method,
            k=max(0, min(limits)) if speculation.enabled else 0,
            room=self.room,
            nodes=nodes,
            attempt=self.request.attempt,
        )

    def statistics(self) -> Statistics:
        tally = self.tally
        return Statistics(
            prompt_tokens=self.prompt_len,
            cached_tokens=min(tally.cached_tokens, self.prompt_len),
            output_tokens=len(self.tokens) - self.prompt_len,
            rounds=tally.rounds,
            drafted=tally.drafted,
            accepted=tally.accepted,
            accepted_by_position=tuple(tally.accepted_by_position),
            drafted_by_position=tuple(tally.drafted_by_position),
            preemptions=tally.preemptions,
            by_source=tuple(tally.by_source.values()),
            rule=tally.rule,
            lossy=tally.lossy,
        )
