"""Rule `coupled`: a draft stands while it is the target's own draw.

Knows: that draws keyed by (seed, position) make the answer a function of (seed, position, law).
Refuses to know: probabilities.
"""

from __future__ import annotations

from cluster.verify.rules.base import Facts, Rule, Ruling, follow


def coupled(facts: Facts) -> Ruling:
    """What is emitted is always the target's own draw, whatever was drafted. Source: arXiv 2408.07978."""
    return follow(facts, lambda slot: facts.own[slot])


RULE = Rule("coupled", coupled, reads_own=True, reads_laws=False, exact=True)
