"""Acceptance rules: given what the target says, how many draft tokens stand and what follows them.

Knows: one pure function a rule; every random number it reads is handed in by key.
Refuses to know: sequences, logits processing, stopping, devices.

Legend of shape suffixes: D draft positions, P = D + 1 judged positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.messages import DraftLaw
from cluster.model.sample import noise_key, uniform

#: Streams of random numbers of one round; no two readers share one.
ACCEPT_STREAM = 1
RECOVER_STREAM = 2
BONUS_STREAM = 3


@dataclass(frozen=True, slots=True)
class Ruling:
    """accepted drafts, then one token of the target's own."""

    accepted: int
    tokens: tuple[int, ...]


def coupled(drafts: Sequence[int], own: Sequence[int]) -> Ruling:
    """Accept while the draft is the target's own draw at that position.

    own: P tokens the target drew with noise keyed by (seed, position), each given the drafts
    before it. What is emitted is always the target's own draw, so the output is a function of
    (seed, position, law) whatever was drafted. Source: arXiv 2408.07978.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == own[accepted]:
        accepted += 1
    return Ruling(accepted, tuple(own[: accepted + 1]))


def ratio(drafts: Sequence[int], target_PV: torch.Tensor, law: DraftLaw | None, seed: int, round_: int) -> Ruling:
    """Accept x with probability min(1, p(x)/q(x)); at the first rejection draw from max(p - q, 0).

    target_PV: float64 laws of the target. law: what the drafts were sampled from; None means
    point masses (q(x) = 1). Draws are keyed (seed, round, slot, stream) and each is read once.
    Source: Leviathan et al. 2211.17192, Chen et al. 2302.01318.
    """
    chances = target_PV[range(len(drafts)), drafts].tolist() if drafts else []
    for slot, (token, p) in enumerate(zip(drafts, chances, strict=True)):
        q = _draft_probability(law, slot, token)
        if uniform(noise_key(seed, round_, slot, ACCEPT_STREAM)) * q < p:
            continue
        own = _draw(_residual(target_PV[slot], law, slot, token), noise_key(seed, round_, slot, RECOVER_STREAM))
        return Ruling(slot, (*drafts[:slot], own))
    own = _draw(target_PV[len(drafts)], noise_key(seed, round_, len(drafts), BONUS_STREAM))
    return Ruling(len(drafts), (*drafts, own))


def _draft_probability(law: DraftLaw | None, slot: int, token: int) -> float:
    if law is None:
        return 1.0
    return float(law.probs[slot][law.ids[slot] == token].sum())


def _residual(p_V: torch.Tensor, law: DraftLaw | None, slot: int, token: int) -> torch.Tensor:
    """max(p - q, 0), not normalised; p itself where rounding leaves nothing."""
    residual = p_V.clone()
    if law is None:
        residual[token] = 0.0
    else:
        ids = torch.as_tensor(law.ids[slot], device=p_V.device)
        q = torch.as_tensor(law.probs[slot], dtype=p_V.dtype, device=p_V.device)
        residual.index_add_(0, ids, -q)
        residual.clamp_(min=0.0)
    return residual if float(residual.sum()) > 0.0 else p_V


def _draw(weights_V: torch.Tensor, key: int) -> int:
    """A token with probability proportional to its weight (inversion: nothing here needs coupling).

    uniform(key) < 1, so a cumulative weight above the mark exists and its token weighs something.
    """
    mass_V = weights_V.cumsum(0)
    return int(torch.searchsorted(mass_V, uniform(key) * mass_V[-1], right=True))
