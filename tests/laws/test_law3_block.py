"""Law 3 for `block`: over 100,000 draws with each kind of proposer, and the two faults that tempt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.model.sample import noise_key, uniform
from cluster.verify.rules.base import ACCEPT_STREAM, Facts, Ruling
from cluster.verify.rules.block import _next, _stands, _weights, block
from tests.laws.chi_square import LEAST_P
from tests.laws.test_law3_exact import FULL, PLANTED, PROPOSERS, answers, p_value
from tests.rulings import plant

#: Sampled with a law, and point masses: each with drafts that often stand and drafts that seldom do.
NAMES = ("model", "sampled", "ngram", "liar")


@pytest.mark.parametrize("name", NAMES)
def test_block_follows_the_law(name: str) -> None:
    found = answers("block", PROPOSERS[name](), FULL)
    assert sum(len(tokens) for _, tokens in found) >= 100_000
    assert p_value(found) > LEAST_P


@pytest.mark.parametrize("name", NAMES)
def test_draws_keyed_by_position_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round reads again the draws that failed beyond where this one stopped."""

    def by_position(self: Facts, slot: int, stream: int) -> float:
        return uniform(noise_key(self.seed, self.emitted + slot, stream))

    monkeypatch.setattr(Facts, "noise", by_position)
    assert p_value(answers("block", PROPOSERS[name](), FULL)) < LEAST_P


@pytest.mark.parametrize("name", NAMES)
def test_stopping_at_the_first_failure_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_failure(facts: Facts) -> Ruling:
        weights = _weights(facts)
        count = 0
        while count < len(facts.drafts) and facts.noise(count, ACCEPT_STREAM) <= _stands(facts, weights, count + 1):
            count += 1
        return Ruling(count, (*facts.drafts[:count], _next(facts, weights, count)))

    plant(monkeypatch, "block", first_failure)
    assert p_value(answers("block", PROPOSERS[name](), PLANTED)) < LEAST_P


@pytest.mark.parametrize("name", ["model", "sampled"])
def test_a_law_left_out_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled drafts judged as point masses."""
    plant(monkeypatch, "block", lambda facts: block(replace(facts, law=None)))
    assert p_value(answers("block", PROPOSERS[name](), PLANTED)) < LEAST_P
