"""What the closed forms say a scenario should do, beside which every measurement is shown.

Knows: which passes of which devices a round of each mode consists of.
Refuses to know: overheads: a prediction has none, so that the difference shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cluster.control.latency import expected_tokens, survival
from deploy.simulation.playback import ALONE, Played, play
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
    return ALONE if mode == "none" else play(texts, scenario.k)


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


_PREDICTIONS: Mapping[Mode, Callable[[Scenario, int], Prediction]] = {
    "none": _none,
    "colocated": lambda scenario, batch: _turns(scenario, batch, 1),
    "sync": lambda scenario, batch: _turns(scenario, batch, min(batch, scenario.drafters)),
}
