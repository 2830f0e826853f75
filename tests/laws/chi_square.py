"""Do many answers follow a known law? Joint over three consecutive tokens, not only the first.

The target and the draft of these tests look at one token only, so answers are Markov chains and
the law of three tokens after any known one is a product of three table entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import chi2

#: Tokens a window spans.
SPAN = 3

#: Cells that expect fewer are counted together, as the chi-square approximation asks.
_FEWEST = 5

#: The seeds are fixed, so a test that passes passes always; a fault lands many orders below this.
LEAST_P = 1e-4


@dataclass(frozen=True)
class ChainLaws:
    """Logits that depend on the last token alone: row `t` of `table` follows token t."""

    table: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rows", torch.tensor(self.table).log().unbind())

    def __call__(self, context: Sequence[int]) -> torch.Tensor:
        return self._rows[context[-1]]

    def chances(self, temperature: float) -> np.ndarray:
        """float64 [V, V]: the law after each token, by definition rather than by the product's code."""
        weights = np.asarray(self.table, dtype=np.float64) ** (1.0 / temperature)
        return weights / weights.sum(axis=1, keepdims=True)


def windows_p_value(answers: Iterable[tuple[int, Sequence[int]]], chances: np.ndarray) -> float:
    """Chi-square p-value of disjoint windows of SPAN tokens, each given the token before it.

    answers: (last token of the prompt, emitted tokens); chances [V, V]: law after each token.
    """
    size = chances.shape[0]
    counts = np.zeros((size,) * (SPAN + 1))
    for before, tokens in answers:
        chain = [before, *tokens]
        for start in range(0, len(tokens) - SPAN + 1, SPAN):
            counts[tuple(chain[start : start + SPAN + 1])] += 1
    law = np.einsum("ab,bc,cd->abcd", chances, chances, chances)
    expected = counts.sum(axis=(1, 2, 3), keepdims=True) * law
    statistic, freedom = 0.0, 0
    for seen, due in zip(counts.reshape(size, -1), expected.reshape(size, -1), strict=True):
        rare = due < _FEWEST
        seen, due = np.append(seen[~rare], seen[rare].sum()), np.append(due[~rare], due[rare].sum())
        if due[-1] < _FEWEST:  # too little even together: goes to the rarest of the others
            seen, due = np.append(seen[:-2], seen[-2:].sum()), np.append(due[:-2], due[-2:].sum())
        statistic += float(((seen - due) ** 2 / due).sum())
        freedom += len(due) - 1
    return float(chi2.sf(statistic, freedom))
