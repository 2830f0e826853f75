"""Raw log-probabilities: of emitted tokens, and of a prompt's own tokens as its pieces are computed.

Knows: log-softmax before temperature, masks and penalties, and which prompt tokens were told so far.
Refuses to know: sampling, drafts, blocks.

Legend of shape suffixes: P positions of one row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.messages import TokenLogprob


class PromptLogprobs:
    """Of one request. `wanted`: alternatives beside each token; None: nothing is told."""

    def __init__(self, prompt: Sequence[int], wanted: int | None) -> None:
        self._prompt = tuple(prompt)
        self._wanted = wanted
        self._told: dict[int, TokenLogprob] = {}

    def note(self, raw_PV: torch.Tensor, first: int) -> None:
        """The logits at positions first, first + 1, ...; a position computed again replaces what it said."""
        if self._wanted is not None:
            tokens = self._prompt[first + 1 : first + 1 + len(raw_PV)]
            self._told.update(enumerate(logprobs_of(raw_PV, tokens, self._wanted), start=first + 1))

    def take(self) -> tuple[TokenLogprob, ...]:
        """Those of all prompt tokens after the first, in order, once; then nothing."""
        told, self._told = self._told, {}
        return tuple(told[position] for position in sorted(told))


def logprobs_of(raw_PV: torch.Tensor, tokens: Sequence[int], alternatives: int) -> tuple[TokenLogprob, ...]:
    """Log-softmax of one token a row with its rank, and the likeliest alternatives."""
    logprobs_PV = torch.log_softmax(raw_PV.float(), dim=1)
    tokens_P1 = torch.tensor(tokens, dtype=torch.int64, device=raw_PV.device).unsqueeze(1)
    chosen_P1 = logprobs_PV.gather(1, tokens_P1)
    likelier_P = (logprobs_PV > chosen_P1).sum(dim=1).tolist()
    values, indices = logprobs_PV.topk(min(alternatives, logprobs_PV.shape[1]), dim=1)
    told = zip(tokens, chosen_P1.squeeze(1).tolist(), indices.tolist(), values.tolist(), likelier_P, strict=True)
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(ids, tops, strict=True)), likelier + 1)
        for token, logprob, ids, tops, likelier in told
    )
