"""Rule `threshold`, lossy: a draft stands where the target finds it likely enough.

Knows: that the request's own draw stands too, so that no draft `coupled` would keep is refused.
Refuses to know: how the threshold moves (`cluster.request`).
"""

from __future__ import annotations

from cluster.verify.rules.base import Facts, Rule, Ruling, standing


def threshold(facts: Facts) -> Ruling:
    """Accept while p(x) is at least the threshold now in force, or x is the target's own draw anyway.

    The threshold follows from the tokens and rounds before this one.
    """
    least = facts.threshold.at(facts.emitted, facts.outcomes)
    return standing(facts, [least] * (len(facts.drafts) + 1))


RULE = Rule("threshold", threshold, reads_own=True, reads_laws=True, exact=False)
