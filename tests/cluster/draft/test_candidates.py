"""The drafter's own sampling, and its confidence in a token not yet drawn."""

from __future__ import annotations

import math

import pytest
import torch

from cluster.draft.candidates import Candidates, Measure
from cluster.request import Sampling

ROWS = torch.tensor([[0.9, 0.05, 0.05], [0.4, 0.3, 0.3], [1 / 3, 1 / 3, 1 / 3]]).log()


def entropy(*chances: float) -> float:
    return -sum(p * math.log(p) for p in chances)


def test_what_is_not_said_is_the_requests_own() -> None:
    asked = Sampling(9, temperature=0.7, top_k=5, top_p=0.8, seed=3)
    assert Candidates().sampling(asked) == asked
    own = Candidates(temperature=1.2, top_p=0.92).sampling(asked)
    assert (own.temperature, own.top_k, own.top_p, own.seed) == (1.2, 5, 0.92, 3)


def test_a_greedy_request_is_drafted_greedily() -> None:
    assert Candidates(temperature=1.0, top_p=0.5).sampling(Sampling(9, temperature=0.0)).greedy


@pytest.mark.parametrize(
    ("measure", "bounds"),
    [
        ("top", (0.9, 0.4, 1 / 3)),
        ("entropy", [1 - math.sqrt(0.2 * entropy(*row.exp().tolist())) for row in ROWS]),
    ],
)
def test_confidence_is_what_it_says(measure: Measure, bounds: tuple[float, ...]) -> None:
    for row, bound in zip(ROWS, bounds, strict=True):
        for offset, sure in ((-1e-4, True), (1e-4, False)):
            assert Candidates(min_confidence=bound + offset, measure=measure).confident(row[None]) == [sure]


def test_rows_are_judged_apart_and_zero_never_stops() -> None:
    assert Candidates(min_confidence=0.5).confident(ROWS) == [True, False, False]
    assert Candidates().confident(ROWS) == [True] * 3


def test_a_certain_row_has_no_entropy() -> None:
    certain = torch.tensor([[0.0, float("-inf")]])
    assert Candidates(min_confidence=1.0, measure="entropy").confident(certain) == [True]
