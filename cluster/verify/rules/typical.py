"""Rule `typical`, lossy: a draft stands where it is likely for how undecided the target is.

Knows: entropy of the target's law at each draft.
Refuses to know: anything about earlier rounds.
"""

from __future__ import annotations

import torch

from cluster.verify.rules.base import Facts, Rule, Ruling, standing


def typical(facts: Facts) -> Ruling:
    """Accept while p(x) >= min(epsilon, delta * exp(-H(p))), or x is the target's own draw anyway.

    H in nats. Source: Medusa, 2401.10774.
    """
    settings = facts.typical
    entropy_P = torch.special.entr(facts.target_PV).sum(dim=1)
    least = (settings.delta * torch.exp(-entropy_P)).clamp(max=settings.epsilon).tolist()
    return standing(facts, least)


RULE = Rule("typical", typical, reads_own=True, reads_laws=True, exact=False)
