"""What every acceptance rule is given and what it answers.

Knows: the facts of one row, the streams of random numbers, and the arithmetic rules share.
Refuses to know: sequences, logits processing, stopping, devices, and which rules there are.

A position to be judged is a slot: slot 0 follows the last known token, slot i + 1 follows draft i.

Legend of shape suffixes: D drafts, P = D + 1 slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cluster.messages import DraftLaw
from cluster.model.sample import noise_key, uniform
from cluster.request import RuleName, ScheduledThreshold, Threshold, Typical

#: Streams of random numbers of one round; no two readers share one, and each number is read once.
ACCEPT_STREAM = 1
RECOVER_STREAM = 2
BONUS_STREAM = 3

_NO_LAWS = torch.zeros((0, 0), dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Ruling:
    """accepted drafts, then one token of the target's own; path: which nodes those are, of a tree."""

    accepted: int
    tokens: tuple[int, ...]
    path: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """One row as a rule sees it. What a rule does not declare to read may be empty.

    drafts: D draft tokens.
    parents: of a tree of point masses, by node; None: each draft follows the one before.
    own: P tokens the target drew with noise keyed (seed, position), each given the drafts before it.
    target_PV: the target's laws, float64; slot i given the drafts up to i - 1 on its path.
    law: what the drafts were sampled from; None means point masses (q(x) = 1).
    seed, round: name the random numbers of this round, with a slot and a stream.
    emitted: tokens of the answer before this round.
    outcomes: (drafted, accepted) of the request's last rounds with drafts, oldest first.
    threshold, typical: parameters of the rules of the same names.
    """

    drafts: Sequence[int]
    own: Sequence[int] = ()
    target_PV: torch.Tensor = _NO_LAWS
    law: DraftLaw | None = None
    seed: int = 0
    round: int = 0
    emitted: int = 0
    outcomes: Sequence[tuple[int, int]] = ()
    threshold: Threshold = ScheduledThreshold()
    typical: Typical = Typical()
    parents: Sequence[int] | None = None

    def children(self, slot: int) -> list[int]:
        """Drafts that follow a slot, likelier ones first."""
        if self.parents is None:
            return [slot] if slot < len(self.drafts) else []
        return [node for node, parent in enumerate(self.parents) if parent == slot - 1]

    def noise(self, slot: int, stream: int) -> float:
        """A number in (0, 1) that nobody else reads: rounds never repeat in an engine's life."""
        return uniform(noise_key(self.seed, self.round, slot, stream))

    def chances(self) -> list[float]:
        """p(x) of each draft."""
        if not self.drafts:
            return []
        slots = range(len(self.drafts)) if self.parents is None else [parent + 1 for parent in self.parents]
        return self.target_PV[list(slots), list(self.drafts)].tolist()

    def drawn(self, slot: int) -> int:
        """A fresh draw from the target's law at a slot."""
        return _draw(self.target_PV[slot], self.noise(slot, BONUS_STREAM))

    def draft_chance(self, slot: int) -> float:
        """q(x) of the draft at `slot`."""
        if self.law is None:
            return 1.0
        return float(self.law.probs[slot][self.law.ids[slot] == self.drafts[slot]].sum())

    def residual(self, slot: int, weight: float = 1.0) -> torch.Tensor:
        """max(weight * p - q, 0) at `slot`, float64 [V], not normalised."""
        p_V = self.target_PV[slot]
        rest_V = p_V * weight
        if self.law is None:
            rest_V[self.drafts[slot]] -= 1.0
        else:
            ids = torch.as_tensor(self.law.ids[slot], device=p_V.device)
            rest_V.index_add_(0, ids, -torch.as_tensor(self.law.probs[slot], dtype=p_V.dtype, device=p_V.device))
        return rest_V.clamp_(min=0.0)

    def recovered(self, slot: int, weight: float = 1.0) -> int:
        """The token that follows a draft refused at `slot`; drawn from p where rounding leaves no residual."""
        rest_V = self.residual(slot, weight)
        return _draw(rest_V if float(rest_V.sum()) > 0.0 else self.target_PV[slot], self.noise(slot, RECOVER_STREAM))

    def bonus(self) -> int:
        """The token that follows when every draft stands."""
        return self.drawn(len(self.drafts))


@dataclass(frozen=True, slots=True)
class Rule:
    """A pure function and what it needs to be told.

    reads_own: wants `Facts.own`. reads_laws: wants `Facts.target_PV`.
    exact: what is emitted follows the target's law whatever was drafted. A rule that is not exact
    decides by probabilities, which a point mass does not have: where the temperature is 0 it is
    given the target's law at temperature 1.
    """

    name: RuleName
    decide: Callable[[Facts], Ruling]
    reads_own: bool
    reads_laws: bool
    exact: bool


def follow(facts: Facts, says: Callable[[int], int]) -> Ruling:
    """Go down while a draft is what is said there: says(slot), a token that follows the slot.

    With a draw from the target's law, chosen without looking at the drafts, this is exact for chains and
    trees of point masses alike. Only slots on the path are asked.
    """
    slot = 0
    path: list[int] = []
    tokens: list[int] = []
    while True:
        tokens.append(says(slot))
        node = next((node for node in facts.children(slot) if facts.drafts[node] == tokens[-1]), None)
        if node is None:
            return Ruling(len(path), tuple(tokens), None if facts.parents is None else tuple(path))
        path.append(node)
        slot = node + 1


def standing(facts: Facts, least_P: Sequence[float]) -> Ruling:
    """Accept a draft with p(x) >= its slot's least, or the target's own draw anyway; of several the likeliest.

    The target's own draw where none does.
    """
    chances = facts.chances()

    def says(slot: int) -> int:
        children = facts.children(slot)
        if any(facts.drafts[node] == facts.own[slot] for node in children):
            return facts.own[slot]
        standing = [node for node in children if chances[node] >= least_P[slot]]
        return facts.drafts[max(standing, key=lambda node: chances[node])] if standing else facts.own[slot]

    return follow(facts, says)


def _draw(weights_V: torch.Tensor, mark: float) -> int:
    """A token with probability proportional to its weight (inversion: nothing here needs coupling).

    mark < 1, so a cumulative weight above it exists and its token weighs something.
    """
    mass_V = weights_V.cumsum(0)
    return int(torch.searchsorted(mass_V, mark * mass_V[-1], right=True))
