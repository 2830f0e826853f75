"""Acceptance rules, alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from cluster.messages import DraftLaw
from cluster.verify.rules.base import Ruling
from tests.rulings import coupled, ratio

LEAST_P = 1e-4


def point(token: int, vocab: int = 4) -> torch.Tensor:
    return torch.eye(vocab, dtype=torch.float64)[token]


@pytest.mark.parametrize(
    ("drafts", "own", "ruling"),
    [
        ([], [7], Ruling(0, (7,))),
        ([1, 2], [1, 2, 3], Ruling(2, (1, 2, 3))),
        ([1, 2], [1, 9, 3], Ruling(1, (1, 9))),
        ([1, 2], [9, 2, 3], Ruling(0, (9,))),
        ([1, 1, 1], [1, 2, 1, 5], Ruling(1, (1, 2))),
    ],
)
def test_coupled_emits_the_targets_own_draws(drafts: list[int], own: list[int], ruling: Ruling) -> None:
    assert coupled(drafts, own) == ruling


def test_ratio_between_point_masses_is_equality() -> None:
    target = torch.stack([point(1), point(2), point(3)])
    for seed in range(50):
        assert ratio([1, 2], target, None, seed, 1) == Ruling(2, (1, 2, 3))
        assert ratio([1, 0], target, None, seed, 1) == Ruling(1, (1, 2))
        assert ratio([0, 2], target, None, seed, 1) == Ruling(0, (1,))


def test_ratio_never_accepts_or_emits_what_the_target_forbids() -> None:
    target = torch.tensor([[0.0, 0.5, 0.5, 0.0]] * 2, dtype=torch.float64)
    law = DraftLaw(np.arange(4)[None], np.array([[0.7, 0.1, 0.1, 0.1]]))
    for seed in range(500):
        ruling = ratio([0], target, law, seed, 1)
        assert ruling.accepted == 0
        assert ruling.tokens[0] in (1, 2)


def test_equal_laws_always_accept() -> None:
    probs = torch.tensor([[0.3, 0.3, 0.2, 0.2]] * 2, dtype=torch.float64)
    law = DraftLaw(np.arange(4)[None], probs[:1].numpy())
    assert all(ratio([seed % 4], probs, law, seed, 3).accepted == 1 for seed in range(500))


def test_a_residual_that_rounds_to_nothing_falls_back_to_the_target() -> None:
    """q rounds above p everywhere, yet the draft was rejected: some token has to come."""
    target = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    law = DraftLaw(np.array([[0, 1]]), np.array([[0.5 + 1e-7, 0.5 + 1e-7]]))
    assert {ratio([0], target, law, seed, 1).tokens[0] for seed in range(100)} <= {0, 1}


def test_repeated_and_padded_ids_add_up() -> None:
    target = torch.tensor([[0.25] * 4] * 2, dtype=torch.float64)
    law = DraftLaw(np.array([[2, 2, 0, 0]]), np.array([[0.125, 0.125, 0.75, 0.0]]))
    assert all(ratio([2], target, law, seed, 1).accepted == 1 for seed in range(200))


@pytest.mark.parametrize("q", [None, (0.1, 0.2, 0.3, 0.4), (0.97, 0.01, 0.01, 0.01)])
def test_ratio_is_exact_jointly_with_what_follows(q: Sequence[float] | None) -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    target = torch.tensor(np.tile(p, (3, 1)))
    random = np.random.default_rng(5)
    law = None if q is None else DraftLaw(np.tile(np.arange(4), (2, 1)), np.tile(q, (2, 1)))
    counts = np.zeros((4, 4))
    for seed in range(12_000):
        drafts = [3, 1] if q is None else random.choice(4, size=2, p=q).tolist()
        emitted = ratio(drafts, target, law, seed, 1).tokens
        if len(emitted) == 1:  # the next round, without a draft
            emitted += ratio([], target[:1], None, seed, 2).tokens
        counts[emitted[:2]] += 1
    assert chisquare(counts.flatten(), np.outer(p, p).flatten() * counts.sum()).pvalue > LEAST_P


def test_the_same_round_rules_the_same() -> None:
    target = torch.full((3, 4), 0.25, dtype=torch.float64)
    assert len({ratio([0, 1], target, None, 4, 9) for _ in range(5)}) == 1
    assert len({ratio([0, 1], target, None, 4, round_) for round_ in range(50)}) > 3
