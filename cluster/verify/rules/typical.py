"""Rule `typical`, lossy: a draft stands where it is likely for how undecided the target is.

Knows: entropy of the target's law at each draft.
Refuses to know: anything about earlier rounds.
"""

from __future__ import annotations

import torch

from cluster.verify.rules.base import Facts, Rule, Ruling, leading


def typical(facts: Facts) -> Ruling:
    """Accept while p(x) >= min(epsilon, delta * exp(-H(p))), or x is the target's own draw anyway.

    H in nats. Source: Medusa, 2401.10774.
    """
    settings = facts.typical
    p_DV = facts.target_PV[: len(facts.drafts)]
    entropy_D = torch.special.entr(p_DV).sum(dim=1)
    least = (settings.delta * torch.exp(-entropy_D)).clamp(max=settings.epsilon).tolist()
    chances = facts.chances()
    return leading(facts, lambda slot: chances[slot] >= least[slot] or facts.drafts[slot] == facts.own[slot])


RULE = Rule("typical", typical, reads_own=True, reads_laws=True, exact=False)
