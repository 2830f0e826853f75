"""What shapes the target's logits from the tokens that came before: penalties and biases.

Knows: how one position's logits change given the tokens before that position.
Refuses to know: drafts and acceptance; whoever calls says which tokens come before.

Sources: repetition penalty arXiv 1909.05858 (prompt and answer); presence and frequency penalties
as in the OpenAI API reference (answer only).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from cluster.request import Sampling


class History:
    """Token counts of one sequence, kept only as far as its sampling needs them."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling) -> None:
        self._sampling = sampling
        self._seen = set(prompt) if sampling.repetition_penalty != 1.0 else set()
        self._counts: Counter[int] = Counter()

    @property
    def matters(self) -> bool:
        return self._sampling.penalised or bool(self._sampling.logit_bias)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens were emitted."""
        if self._sampling.penalised:
            self._counts.update(tokens)

    def apply(self, logits_PV: torch.Tensor, drafts: Sequence[int]) -> None:
        """Change the logits of P consecutive positions in place; drafts[:i] come before row i."""
        counts = self._counts.copy()
        for slot in range(logits_PV.shape[0]):
            if slot:
                counts[drafts[slot - 1]] += 1
            self._apply_one(logits_PV[slot], counts)

    def _apply_one(self, logits_V: torch.Tensor, counts: Counter[int]) -> None:
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0 and (seen := self._seen | counts.keys()):
            index = torch.tensor(sorted(seen), device=logits_V.device)
            values = logits_V[index]
            penalty = sampling.repetition_penalty
            logits_V[index] = torch.where(values > 0, values / penalty, values * penalty)
        if counts and (sampling.presence_penalty or sampling.frequency_penalty):
            index = torch.tensor(list(counts.keys()), device=logits_V.device)
            times = torch.tensor(list(counts.values()), dtype=logits_V.dtype, device=logits_V.device)
            logits_V[index] -= sampling.presence_penalty + sampling.frequency_penalty * times
        if sampling.logit_bias:
            index = torch.tensor(list(sampling.logit_bias.keys()), device=logits_V.device)
            bias = torch.tensor(list(sampling.logit_bias.values()), dtype=logits_V.dtype, device=logits_V.device)
            logits_V[index] += bias
