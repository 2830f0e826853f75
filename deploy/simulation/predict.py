"""What the closed forms say a scenario should do, beside which every measurement is shown.

Knows: which passes of which devices a round of each mode consists of.
Refuses to know: overheads: a prediction has none, so that the difference shows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cluster.control.latency import expected_tokens, hits, survival
from cluster.draft.guessing import AllAccepted, FanOut, Guessing
from deploy.simulation.playback import ALONE, Guesses, Played, play
from deploy.simulation.scenario import Mode, Scenario

#: Draft lengths among which the best is looked for.
MOST_K = 16


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a batch: tokens of a row and round, share of rows with drafts, milliseconds of a round by who takes them."""

    batch: int
    tokens: float
    hit: float
    target_ms: float
    draft_ms: float  # during which the target waits

    @property
    def round_ms(self) -> float:
        return self.target_ms + self.draft_ms

    @property
    def tokens_s(self) -> float:
        return 1e3 * self.batch * self.tokens / self.round_ms


def predict(scenario: Scenario, mode: Mode, batch: int) -> Prediction:
    """A round of `batch` rows."""
    return _PREDICTIONS[mode](scenario, batch)


def played(scenario: Scenario, mode: Mode, texts: Sequence[npt.NDArray[np.int64]]) -> Played:
    """The rounds of a mode over texts, each the ranks at its positions."""
    if mode == "none":
        return ALONE
    guessing = _GUESSING.get(mode)
    return play(texts, scenario.k, None if guessing is None else guesses_of(scenario, guessing, len(texts)))


def best_k(scenario: Scenario, mode: Mode, batch: int) -> int:
    """The draft length, 1 to MOST_K, that should give most tokens a second."""
    return max(range(1, MOST_K + 1), key=lambda k: predict(replace(scenario, k=k), mode, batch).tokens_s)


def _none(scenario: Scenario, batch: int) -> Prediction:
    return Prediction(batch, 1.0, 0.0, scenario.target.ms(batch), 0.0)


def _turns(scenario: Scenario, batch: int, drafters: int) -> Prediction:
    """k draft passes, then a verification. The first pass also computes the last draft token where all stood."""
    alphas, k = scenario.acceptance.alphas, scenario.k
    rows = batch / drafters
    draft_ms = scenario.draft.ms(rows * (1 + survival(alphas, k)[k])) + (k - 1) * scenario.draft.ms(rows)
    return Prediction(batch, expected_tokens(alphas, k), 1.0, scenario.target.ms(batch * (k + 1)), draft_ms)


def _ahead(scenario: Scenario, batch: int, guessing: Guessing) -> Prediction:
    """Rounds of rows that hit, with k drafts, and rows that missed, with none (SSD's theorem 7 by row, not by batch).

    The drafter needs k + 1 passes a round, one token of every path at a time. Where they take longer than the
    verification, the target waits for the rest.
    """
    alphas, k = scenario.acceptance.alphas, scenario.k
    guesses = guesses_of(scenario, guessing, batch)
    power = scenario.acceptance.miss_power
    hit = hits(alphas, k, guesses.after_draft, guesses.after_plain, power).share
    tokens = hit * expected_tokens(alphas, k) + (1 - hit)
    target_ms = sum(
        math.comb(batch, n) * hit**n * (1 - hit) ** (batch - n) * scenario.target.ms(batch + n * k)
        for n in range(batch + 1)
    )
    paths = batch / scenario.drafters * sum(guesses.after_draft)
    ahead_ms = (k + 1) * scenario.draft.ms(paths)
    return Prediction(batch, tokens, hit, target_ms, max(0.0, ahead_ms - target_ms))


def guesses_of(scenario: Scenario, guessing: Guessing, batch: int) -> Guesses:
    """How many outcomes lookahead guesses, by how many drafts stood; after a plain round its own draft goes on too."""
    chances = survival(scenario.acceptance.alphas, scenario.k)
    stood = sum(chances[1:])
    alpha = stood / (stood + 1 - chances[-1])
    share = max(1, min(scenario.budget, scenario.most_rows // math.ceil(batch / scenario.drafters)))
    return Guesses(guessing.widths(alpha, scenario.k, share), 1 + guessing.widths(alpha, 0, share)[0])


_GUESSING: Mapping[Mode, Guessing] = {"lookahead": FanOut(), "pearl": AllAccepted()}
_PREDICTIONS: Mapping[Mode, Callable[[Scenario, int], Prediction]] = {
    "none": _none,
    "colocated": lambda scenario, batch: _turns(scenario, batch, 1),
    "sync": lambda scenario, batch: _turns(scenario, batch, min(batch, scenario.drafters)),
    "lookahead": lambda scenario, batch: _ahead(scenario, batch, _GUESSING["lookahead"]),
    "pearl": lambda scenario, batch: _ahead(scenario, batch, _GUESSING["pearl"]),
}
