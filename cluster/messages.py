"""The values that pass between the parts of the engine: the seams of the step.

Knows: shapes, units and who hands what to whom.
Refuses to know: how any part computes; no torch here, so that every value can be a wire message.

    scheduler --SequenceView--> proposer --Offer--> judge --Offer--> scheduler --Plan--> runner
    runner --Flight--> judge --Verdict--> scheduler --Delta--> whoever asked

Vocabulary: `k` draft length; `base_len` number of tokens a draft assumes known; `computed_len`
number of leading tokens whose keys and values are in the cache; a position is an absolute index
into a sequence, prompt included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from cluster.request import FinishReason, RuleName, Sampling, ScheduledThreshold, Threshold, Typical
from cluster.tree import depths


@dataclass(frozen=True, slots=True)
class Knobs:
    """What control may turn between steps. Every field is in force from the next step on."""

    k: int = 5  # most draft tokens a row may carry; 0 switches speculation off
    rule: RuleName = "coupled"
    token_budget: int = 512  # most tokens one step computes, drafts included
    adaptive: bool = True  # let control lower k where drafts keep failing
    caps: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))  # k by sequence id
    threshold: Threshold = ScheduledThreshold()
    typical: Typical = Typical()
    max_retries: int = 3  # fruitless rounds before a request's speculation pauses
    tree_nodes: int = 16  # of a step, shared by its sequences: who gets no more than k drafts a chain


@dataclass(frozen=True, slots=True)
class Load:
    """What a step does apart from drafts. rows: sequences that emit a token; tokens: known ones that are computed."""

    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What a proposer may see of a sequence. `tokens` is the live list: read, never write.

    `k` already accounts for the caller's wish, the room left and control's advice: an offer must
    not be longer, a tree not be deeper. `nodes`: how many a tree may have; not above k: draft a chain.
    """

    id: int
    tokens: Sequence[int]
    prompt_len: int
    computed_len: int
    sampling: Sampling
    rule: RuleName
    salt: str
    method: str | None
    k: int
    room: int  # tokens that may still be emitted
    nodes: int = 0
    attempt: int = 0  # as in Request


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """The law each draft token was sampled from, as m (id, probability) pairs a position.

    ids: int64 [k, m]; probs: float64 [k, m], rows summing to 1; ids absent from a row have
    probability 0. It must be exactly the law sampled (DESIGN law 4). Pairs with probability 0 pad.
    """

    ids: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Offer:
    """Draft tokens for positions base_len, base_len + 1, ... of one sequence.

    `law` None means every draft token is a point mass: chosen without randomness that the
    acceptance rule has to account for.
    `parents` None means a chain. Otherwise tokens are the nodes of a tree of point masses, likelier
    ones first: tokens[i] follows tokens[parents[i]], parents[i] < i, or the last known token where that is -1.
    """

    sequence: int
    base_len: int
    tokens: tuple[int, ...]
    law: DraftLaw | None = None
    source: str = ""
    version: int = 0
    parents: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Tokens of one sequence to compute in one step.

    tokens: ids in slots first, first + 1, ... of the sequence; the last `drafts` of them are drafts.
    Slots are positions, but for a tree's nodes (see `parents`).
    blocks: the sequence's block table, covering every slot up to the last of `tokens`.
    wants: how many trailing positions need logits: drafts + 1 where every known token is computed,
    and `told` more before them.
    told: how many of those are read for the log-probabilities of prompt tokens already known.
    parents: of a tree that ends the row; its nodes fill the row's last slots, the first of them possibly
    before `first`, computed already. A node sees what was there before the tree, its ancestors and itself.
    """

    sequence: int
    first: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    drafts: int = 0
    wants: int = 0
    offer: Offer | None = None
    told: int = 0
    parents: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        """One past the last slot filled."""
        return self.first + len(self.tokens)

    @property
    def root(self) -> int:
        """The slot of a tree's first node; `end` without one."""
        return self.end - len(self.parents or ())

    @property
    def positions(self) -> Sequence[int]:
        """Of each token: absolute, a node's by its depth."""
        if self.parents is None:
            return range(self.first, self.end)
        deep = depths(self.parents)[max(0, self.first - self.root) :]
        return (*range(self.first, self.root), *(self.root - 1 + depth for depth in deep))

    @property
    def depth(self) -> int:
        """How many drafts can be accepted at most."""
        return self.drafts if self.parents is None else max(depths(self.parents), default=0)

    @property
    def judged(self) -> int:
        """Trailing positions that get a verdict: 0 for an unfinished prefill chunk, else drafts + 1."""
        return self.wants - self.told


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one step computes. `round` counts steps and never repeats in an engine's life.

    moves: (from, to) slots of the arena, block * block_tokens + offset: keys and values that are copied
    before anything else is done, all read before any is written. So an accepted path becomes a line.
    """

    round: int
    rows: tuple[PlanRow, ...]
    knobs: Knobs
    moves: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-softmax of the target (before temperature, masks, penalties) at one position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # likeliest first
    rank: int = 0  # of the token: one more than how many are likelier; 0: not known


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one request cannot go on; `param` names the field that is to blame, where one is."""

    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target said about one row.

    accepted: how many drafts stand, counting only those emitted.
    tokens: the tokens emitted, in order: the accepted drafts and, unless the answer ended inside
    them, one of the target's own.
    text: what may be shown now; text that could still become a stop string is held back.
    rule, lossy: what judged it, and whether that rule may emit what the target alone would not.
    path: the nodes accepted, where the row held a tree.
    """

    sequence: int
    accepted: int
    tokens: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    rule: RuleName = "coupled"
    lossy: bool = False
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    fault: Fault | None = None
    path: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SourceCount:
    """Drafts of one proposer for one request."""

    source: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Running totals of one request. A tree counts in `drafted` by its nodes, by position by its depth."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose blocks were found in the prefix cache
    output_tokens: int = 0
    rounds: int = 0  # target steps that emitted tokens
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    drafted_by_position: tuple[int, ...] = ()
    preemptions: int = 0
    by_source: tuple[SourceCount, ...] = ()  # in the order of their first draft
    rule: RuleName = "coupled"  # of the last round
    lossy: bool = False  # whether any round was judged by a lossy rule
    failovers: int = 0  # engines that were lost under it

    def after(self, earlier: Statistics) -> Statistics:
        """Of an answer that `earlier` began on an engine that was lost and this one goes on with.

        Work is summed; tokens are not, they count from the prompt in both; what was cached is what
        the first engine that said anything found.
        """
        return replace(
            self,
            cached_tokens=earlier.cached_tokens if earlier.rounds else self.cached_tokens,
            rounds=earlier.rounds + self.rounds,
            drafted=earlier.drafted + self.drafted,
            accepted=earlier.accepted + self.accepted,
            accepted_by_position=_added(earlier.accepted_by_position, self.accepted_by_position),
            drafted_by_position=_added(earlier.drafted_by_position, self.drafted_by_position),
            preemptions=earlier.preemptions + self.preemptions,
            by_source=_added_sources(earlier.by_source, self.by_source),
            lossy=earlier.lossy or self.lossy,
            failovers=earlier.failovers + self.failovers,
        )


def _added(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(first, second, fillvalue=0))


def _added_sources(first: Sequence[SourceCount], second: Sequence[SourceCount]) -> tuple[SourceCount, ...]:
    total: dict[str, SourceCount] = {}
    for count in (*first, *second):
        before = total.get(count.source, SourceCount(count.source, 0, 0))
        total[count.source] = SourceCount(
            count.source, before.drafted + count.drafted, before.accepted + count.accepted
        )
    return tuple(total.values())


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one request since its last delta."""

    request: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    statistics: Statistics = field(default_factory=Statistics)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    fault: Fault | None = None

    @property
    def silent(self) -> bool:
        """Whether it tells nothing: a sign that the engine is well and the request waits."""
        told = self.tokens or self.text or self.prompt_logprobs
        return not told and self.finish is None and self.fault is None
