"""Law 3 for `block`: over 100,000 draws through the engine, and the faults that tempt, planted in the rule alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from cluster.messages import DraftLaw
from cluster.model.sample import noise_key, uniform
from cluster.verify.rules.base import ACCEPT_STREAM, Facts, Ruling
from cluster.verify.rules.block import _next, _stands, _weights, block
from tests.laws.chi_square import LEAST_P
from tests.laws.test_law3_exact import FULL, PROPOSERS, answers, p_value

P = np.array([0.1, 0.6, 0.3])
Q = np.array([0.5, 0.3, 0.2])
LENGTH = 6  # drafts a round
ANSWER = 24
ANSWERS = 400
FIXED = (0, 1, 2, 1, 1, 0)


@pytest.mark.parametrize(
    ("name", "count"),
    [("sampled", FULL), ("model", FULL // 4), ("ngram", FULL // 4)]
    + [pytest.param(name, FULL, marks=pytest.mark.soak) for name in ("model", "ngram")],
)
def test_block_follows_the_law(name: str, count: int) -> None:
    """Drafts sampled under a law that comes with them, well and badly, and point masses."""
    found = answers("block", PROPOSERS[name](), count)
    assert count < FULL or sum(len(tokens) for _, tokens in found) >= 100_000
    assert p_value(found) > LEAST_P


def rounds_p_value(decide: Callable[[Facts], Ruling], *, sampled: bool) -> float:
    """Round after round of one rule over a target that always says P; chi-square of disjoint triples."""
    random = np.random.default_rng(1)
    target = torch.tensor(P).repeat(LENGTH + 1, 1)
    law = DraftLaw(np.tile(np.arange(3), (LENGTH, 1)), np.tile(Q, (LENGTH, 1))) if sampled else None
    counts = np.zeros((3, 3, 3))
    for seed in range(ANSWERS):
        told: list[int] = []
        round_ = 0
        while len(told) < ANSWER:
            drafts: Sequence[int] = random.choice(3, size=LENGTH, p=Q).tolist() if sampled else FIXED
            told += decide(Facts(drafts, (), target, law, seed, round_, len(told))).tokens
            round_ += 1
        for start in range(0, ANSWER, 3):
            counts[tuple(told[start : start + 3])] += 1
    return float(chisquare(counts.ravel(), np.einsum("a,b,c->abc", P, P, P).ravel() * counts.sum()).pvalue)


@pytest.mark.parametrize("sampled", [True, False])
def test_rounds_of_block_follow_the_law(sampled: bool) -> None:
    assert rounds_p_value(block, sampled=sampled) > LEAST_P


def test_draws_keyed_by_position_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round reads again the draws that failed beyond where this one stopped.

    Seen with point masses. Drafts sampled anew each round hide most of it: at this size nothing shows.
    """

    def by_position(self: Facts, slot: int, stream: int) -> float:
        return uniform(noise_key(self.seed, self.emitted + slot, stream))

    monkeypatch.setattr(Facts, "noise", by_position)
    assert rounds_p_value(block, sampled=False) < LEAST_P


@pytest.mark.parametrize("sampled", [True, False])
def test_stopping_at_the_first_failure_is_seen(sampled: bool) -> None:
    def first_failure(facts: Facts) -> Ruling:
        weights = _weights(facts)
        count = 0
        while count < len(facts.drafts) and facts.noise(count, ACCEPT_STREAM) <= _stands(facts, weights, count + 1):
            count += 1
        return Ruling(count, (*facts.drafts[:count], _next(facts, weights, count)))

    assert rounds_p_value(first_failure, sampled=sampled) < LEAST_P


def test_a_law_that_was_not_sampled_is_seen() -> None:
    """transformers#47932 (R2): q handed to the rule is not the law the drafts came from."""
    wrong = DraftLaw(np.tile(np.arange(3), (LENGTH, 1)), np.tile(Q[::-1], (LENGTH, 1)))
    assert rounds_p_value(lambda facts: block(replace(facts, law=wrong)), sampled=True) < LEAST_P


def test_sampled_drafts_may_be_judged_as_point_masses() -> None:
    """They were chosen without looking at the rule's draws: exact, with fewer kept."""
    assert rounds_p_value(lambda facts: block(replace(facts, law=None)), sampled=True) > LEAST_P
