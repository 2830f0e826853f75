"""Rule `block`: the longest draft whose joint chance stands, not the first token that fails.

Knows: block verification of one chain. On a tree of point masses it rules as `ratio` does.
Refuses to know: how drafts were sampled, beyond the law they come with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from cluster.verify.rules.base import ACCEPT_STREAM, Facts, Rule, Ruling, follow


def block(facts: Facts) -> Ruling:
    """Keep the largest i whose own draw is below h_i, then draw from max(w_i * p - q, 0).

    w_0 = 1, w_i = min(1, w_{i-1} * p(x_i) / q(x_i)); Z_i is the mass of max(w_i * p - q, 0) at the
    next position; h_i = Z_i / (Z_i + 1 - w_i) and, for the last, w_i itself. A later draft may stand
    though an earlier one failed its draw, so every draw of a round is fresh: draws keyed by position
    would be read again in the next round and bias it. Source: Sun et al. 2403.10444.
    """
    if facts.parents is not None:
        return follow(facts, facts.drawn)
    weights = _weights(facts)
    for count in range(len(facts.drafts), 0, -1):
        if facts.noise(count - 1, ACCEPT_STREAM) <= _stands(facts, weights, count):
            return Ruling(count, (*facts.drafts[:count], _next(facts, weights, count)))
    return Ruling(0, (_next(facts, weights, 0),))


def _weights(facts: Facts) -> list[float]:
    """w_0 to w_D."""
    ratios = [p / facts.draft_chance(slot) for slot, p in enumerate(facts.chances())]
    return list(accumulate(ratios, lambda weight, ratio: min(1.0, weight * ratio), initial=1.0))


def _stands(facts: Facts, weights: Sequence[float], count: int) -> float:
    """h of the first `count` drafts. Where 0 / 0, the next draft is sure to be the target's: 1, the limit."""
    weight = weights[count]
    if count == len(facts.drafts) or weight in (0.0, 1.0):
        return weight
    mass = float(facts.residual(count, weight).sum())
    return mass / (mass + 1.0 - weight)


def _next(facts: Facts, weights: Sequence[float], count: int) -> int:
    return facts.bonus() if count == len(facts.drafts) else facts.recovered(count, weights[count])


RULE = Rule("block", block, reads_own=False, reads_laws=True, exact=True)
