"""How a drafting model chooses its tokens, and when it had better stop.

Knows: the drafter's own temperature, top-k and top-p, and its confidence in a token not yet drawn.
Refuses to know: models, caches, acceptance.

Law 6: whether a token is drafted is decided from the law it would be drawn from, before it is
drawn, so a cut never depends on the token it cuts.

Legend of shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from cluster.request import Sampling

#: How a drafter's confidence in its next token is measured; both are between 0 and 1.
Measure = Literal["top", "entropy"]

#: The entropy bound's gamma: a draft of entropy H (nats) stands with a chance of about 1 - sqrt(gamma H) or more.
_GAMMA = 0.2


@dataclass(frozen=True, slots=True)
class Candidates:
    """How draft tokens are chosen. A temperature, top_k or top_p of None is the request's own.

    most: tokens drafted at most, whatever k allows.
    min_confidence: drafting stops before a token whose confidence is lower; 0 never stops.
    measure: "top" is the probability of the likeliest token; "entropy" is 1 - sqrt(0.2 H), below
    which the acceptance of a token drawn from a law of entropy H seldom lies (AdaEDL, arXiv 2410.18351).
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    most: int = 15
    min_confidence: float = 0.0
    measure: Measure = "top"

    def sampling(self, asked: Sampling) -> Sampling:
        """The request's sampling with the drafter's own values in it.

        A greedy request is always drafted greedily: its target takes the likeliest token, and any
        other guess only loses.
        """
        if asked.greedy:
            return asked
        own = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return replace(asked, **{name: value for name, value in own.items() if value is not None})  # type: ignore[arg-type]

    def confident(self, logits_BV: torch.Tensor) -> list[bool]:
        """For each row, whether its next token is worth drawing, by its law at temperature 1 and uncut."""
        if self.min_confidence <= 0.0:
            return [True] * len(logits_BV)
        probs_BV = torch.softmax(logits_BV.float(), dim=1)
        if self.measure == "top":
            confidence_B = probs_BV.amax(dim=1)
        else:
            confidence_B = 1.0 - (_GAMMA * torch.special.entr(probs_BV).sum(dim=1)).sqrt()
        return (confidence_B >= self.min_confidence).tolist()
