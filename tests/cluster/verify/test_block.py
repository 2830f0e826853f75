"""Block verification, alone: the paper's example, the law, and how it differs from token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from cluster.messages import DraftLaw
from cluster.verify.rules.base import Facts, Ruling
from tests.rulings import block, ratio

LEAST_P = 1e-4
Rule = Callable[[Sequence[int], torch.Tensor, DraftLaw | None, int, int], Ruling]


def laws(p: Sequence[float], positions: int) -> torch.Tensor:
    return torch.tensor(p, dtype=torch.float64).repeat(positions, 1)


def sampled_from(q: Sequence[float], positions: int) -> DraftLaw:
    return DraftLaw(np.tile(np.arange(len(q)), (positions, 1)), np.tile(q, (positions, 1)))


def mean_accepted(rule: Rule, p: Sequence[float], q: Sequence[float], length: int, times: int) -> float:
    random = np.random.default_rng(3)
    drafts = random.choice(len(q), size=(times, length), p=q).tolist()
    target, law = laws(p, length + 1), sampled_from(q, length)
    return sum(rule(draft, target, law, seed, 1).accepted for seed, draft in enumerate(drafts)) / times


@pytest.mark.parametrize(("rule", "wanted"), [(block, 11 / 9), (ratio, 10 / 9)])
def test_the_papers_example(rule: Rule, wanted: float) -> None:
    """2403.10444, section 2. Standard error of the mean: 0.006; the two differ by 0.11."""
    found = mean_accepted(rule, (1 / 3, 2 / 3), (2 / 3, 1 / 3), 2, 20_000)
    assert found == pytest.approx(wanted, abs=0.025)


def test_it_keeps_no_fewer_than_token_by_token() -> None:
    p, q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)
    assert mean_accepted(block, p, q, 4, 4_000) > mean_accepted(ratio, p, q, 4, 4_000)


@pytest.mark.parametrize("q", [None, (0.1, 0.2, 0.3, 0.4), (0.97, 0.01, 0.01, 0.01)])
def test_it_is_exact_jointly_with_what_follows(q: Sequence[float] | None) -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    target = laws(p.tolist(), 4)
    random = np.random.default_rng(5)
    law = None if q is None else sampled_from(q, 3)
    counts = np.zeros((4, 4, 4))
    for seed in range(6_000):
        drafts = [3, 0, 1] if q is None else random.choice(4, size=3, p=q).tolist()
        emitted = block(drafts, target, law, seed, 1).tokens
        while len(emitted) < 3:  # the rounds after it, without drafts
            emitted += block([], target[:1], None, seed, 2 + len(emitted)).tokens
        counts[emitted[:3]] += 1
    wanted = np.einsum("a,b,c->abc", p, p, p) * counts.sum()
    assert chisquare(counts.flatten(), wanted.flatten()).pvalue > LEAST_P


def test_between_point_masses_it_is_equality() -> None:
    target = torch.eye(4, dtype=torch.float64)[[1, 2, 3]]
    for seed in range(50):
        assert block([1, 2], target, None, seed, 1) == Ruling(2, (1, 2, 3))
        assert block([1, 0], target, None, seed, 1) == Ruling(1, (1, 2))
        assert block([0, 2], target, None, seed, 1) == Ruling(0, (1,))


def test_equal_laws_always_stand() -> None:
    p = (0.3, 0.3, 0.2, 0.2)
    assert all(block([seed % 4, 1, 2], laws(p, 4), sampled_from(p, 3), seed, 3).accepted == 3 for seed in range(300))


def test_what_the_target_forbids_is_never_kept() -> None:
    target = laws((0.0, 0.5, 0.5, 0.0), 3)
    law = sampled_from((0.7, 0.1, 0.1, 0.1), 2)
    for seed in range(300):
        first, second = block([1, 0], target, law, seed, 1), block([0, 1], target, law, seed, 1)
        assert first.accepted <= 1
        assert second.accepted == 0
        assert {*first.tokens, *second.tokens} <= {1, 2}


def test_one_draft_is_token_by_token() -> None:
    """With one draft the two rules are one, draw for draw."""
    target, law = laws((0.5, 0.3, 0.2), 2), sampled_from((0.2, 0.2, 0.6), 1)
    for seed in range(200):
        assert block([seed % 3], target, law, seed, 4) == ratio([seed % 3], target, law, seed, 4)


def test_no_number_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int, int, int]] = []
    noise = Facts.noise

    def noted(self: Facts, slot: int, stream: int) -> float:
        read.append((self.seed, self.round, slot, stream))
        return noise(self, slot, stream)

    monkeypatch.setattr(Facts, "noise", noted)
    facts = Facts([0, 1, 2, 0], (), laws((0.5, 0.3, 0.2), 5), sampled_from((0.2, 0.2, 0.6), 4), seed=1)
    for round_ in range(200):
        here = replace(facts, round=round_)
        block(here.drafts, here.target_PV, here.law, here.seed, here.round)
    assert len(read) == len(set(read)) > 400
