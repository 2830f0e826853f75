"""Law 4: the q in an offer is exactly the law its tokens were sampled from, after every processor."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from cluster.draft.model import TOP_M
from cluster.messages import Knobs, Offer, SequenceView
from cluster.request import Sampling
from tests.fakes import FakeSetup, HashedLaws, draft_proposer
from tests.laws.chi_square import LEAST_P

SMALL, LARGE = 12, 200
PROMPT = (1, 2, 3)

SHAPES = {
    "plain": Sampling(max_tokens=100),
    "cold": Sampling(max_tokens=100, temperature=0.6),
    "hot": Sampling(max_tokens=100, temperature=1.8),
    "top_k": Sampling(max_tokens=100, top_k=4),
    "top_k 1": Sampling(max_tokens=100, top_k=1),
    "top_p": Sampling(max_tokens=100, top_p=0.7),
    "min_p": Sampling(max_tokens=100, min_p=0.2),
    "all": Sampling(max_tokens=100, temperature=0.9, top_k=7, top_p=0.85, min_p=0.05),
}


def expected(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """The law by definition, in float64 numpy, one processor after another."""
    weights = logits.double().numpy() / sampling.temperature
    order = np.argsort(-weights, kind="stable")
    law = np.exp(weights - weights.max())
    if sampling.top_k:
        law[order[sampling.top_k :]] = 0.0
    law /= law.sum()
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= sampling.top_p]] = 0.0
    law[law < sampling.min_p * law.max()] = 0.0
    law[order[TOP_M:]] = 0.0
    return law / law.sum()


def offers(vocab: int, sampling: Sampling, count: int, k: int = 3) -> tuple[HashedLaws, list[Offer]]:
    laws = HashedLaws(vocab, sharp=1.0)
    drafter = draft_proposer(FakeSetup(vocab_size=vocab), laws)
    view = SequenceView(0, PROMPT, len(PROMPT), 2, sampling, "ratio", "", None, k, 50)
    drafter.open(view)
    return laws, [drafter.propose([view], Knobs())[0] for _ in range(count)]


def dense(offer: Offer, slot: int, vocab: int) -> np.ndarray:
    assert offer.law is not None
    law = np.zeros(vocab)
    np.add.at(law, offer.law.ids[slot], offer.law.probs[slot])
    return law


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_law_shipped_is_the_law_by_definition(shape: str, vocab: int) -> None:
    """transformers#47932, #33534 (R2): not the raw law, not another precision, at every position."""
    laws, made = offers(vocab, SHAPES[shape], 20)
    for offer in made:
        for slot, token in enumerate(offer.tokens):
            context = PROMPT + offer.tokens[:slot]
            law = dense(offer, slot, vocab)
            np.testing.assert_allclose(law, expected(laws(context), SHAPES[shape]), atol=2e-6)
            assert law[token] > 0
            assert law.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tokens_follow_the_law_shipped(shape: str) -> None:
    _, made = offers(SMALL, SHAPES[shape], 4000, k=1)
    law = dense(made[0], 0, SMALL)
    seen = Counter(offer.tokens[0] for offer in made)
    likely = law * len(made) >= 5
    counts = np.array([seen[token] for token in range(SMALL)])
    assert not counts[law == 0].any()
    if likely.sum() > 1:
        share = law[likely] / law[likely].sum()
        assert chisquare(counts[likely], share * counts[likely].sum()).pvalue > LEAST_P


def test_a_greedy_row_and_a_coupled_row_ship_no_law() -> None:
    drafter = draft_proposer(FakeSetup(vocab_size=SMALL), HashedLaws(SMALL))
    for number, (rule, temperature) in enumerate((("ratio", 0.0), ("coupled", 1.0), ("coupled", 0.0))):
        view = SequenceView(number, PROMPT, 3, 2, Sampling(temperature=temperature), rule, "", None, 3, 50)
        drafter.open(view)
        assert drafter.propose([view], Knobs())[0].law is None


def test_each_round_samples_anew() -> None:
    """A draw that a rule has read is never offered again: the same row is drafted with fresh noise."""
    _, made = offers(SMALL, Sampling(max_tokens=100), 30)
    assert len({offer.tokens for offer in made}) > 10
