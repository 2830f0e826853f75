"""Rule `ratio`: a draft stands with probability min(1, p / q), one after another.

Knows: rejection sampling token by token; on a tree of point masses, one fresh draw a node.
Refuses to know: how drafts were sampled, beyond the law they come with.
"""

from __future__ import annotations

from cluster.verify.rules.base import ACCEPT_STREAM, Facts, Rule, Ruling, follow


def ratio(facts: Facts) -> Ruling:
    """At the first rejection draw from max(p - q, 0). Source: Leviathan 2211.17192, Chen 2302.01318."""
    if facts.parents is not None:
        return follow(facts, facts.drawn)
    for slot, p in enumerate(facts.chances()):
        if facts.noise(slot, ACCEPT_STREAM) * facts.draft_chance(slot) >= p:
            return Ruling(slot, (*facts.drafts[:slot], facts.recovered(slot)))
    return Ruling(len(facts.drafts), (*facts.drafts, facts.bonus()))


RULE = Rule("ratio", ratio, reads_own=False, reads_laws=True, exact=True)
