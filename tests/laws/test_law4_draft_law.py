"""Law 4: the q in an offer is exactly the law its tokens were sampled from, after every processor."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from cluster.draft.drawing import TOP_M
from cluster.messages import Knobs, Offer, SequenceView
from cluster.request import Sampling
from tests.fakes import FakeSetup, HashedLaws, draft_proposer
from tests.laws.chi_square import LEAST_P

SMALL, LARGE = 12, 200
PROMPT, ANSWER = (1, 2, 3), (4, 4, 2)
KNOWN = PROMPT + ANSWER
EOS = frozenset({0, 7})

SHAPES = {
    "plain": Sampling(max_tokens=100),
    "cold": Sampling(max_tokens=100, temperature=0.6),
    "hot": Sampling(max_tokens=100, temperature=1.8),
    "top_k": Sampling(max_tokens=100, top_k=4),
    "top_k 1": Sampling(max_tokens=100, top_k=1),
    "top_p": Sampling(max_tokens=100, top_p=0.7),
    "min_p": Sampling(max_tokens=100, min_p=0.2),
    "all": Sampling(max_tokens=100, temperature=0.9, top_k=7, top_p=0.85, min_p=0.05),
    "repetition": Sampling(max_tokens=100, repetition_penalty=1.8),
    "frequency": Sampling(max_tokens=100, frequency_penalty=1.5, presence_penalty=-0.5),
    "bias": Sampling(max_tokens=100, logit_bias={5: 3.0, 1: -100.0}),
    "allowed": Sampling(max_tokens=100, allowed_ids=(1, 4, 6, 9)),
    "bad": Sampling(max_tokens=100, bad_ids=((6,), (2, 8), (4, 5))),
    "no end yet": Sampling(max_tokens=100, min_tokens=5),
    "everything": Sampling(
        max_tokens=100, temperature=0.8, top_k=6, repetition_penalty=1.3, frequency_penalty=0.7, min_tokens=5,
        logit_bias={3: 2.0}, allowed_ids=(0, 1, 2, 3, 4, 6, 7, 8, 9), bad_ids=((9,), (3, 4)),
    ),
}  # fmt: skip


def processed(logits: torch.Tensor, sampling: Sampling, answer: tuple[int, ...]) -> np.ndarray:
    """What penalties, biases and masks leave, by their definitions, after these tokens of an answer."""
    weights = logits.double().numpy().copy()
    for token in {*PROMPT, *answer}:
        weights[token] *= sampling.repetition_penalty ** (-1 if weights[token] > 0 else 1)
    for token, times in Counter(answer).items():
        weights[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token, bias in sampling.logit_bias.items():
        weights[token] += bias
    if sampling.allowed_ids is not None:
        weights[[token for token in range(len(weights)) if token not in sampling.allowed_ids]] = -np.inf
    for *begin, end in sampling.bad_ids:
        if list(answer[len(answer) - len(begin) :]) == begin:
            weights[end] = -np.inf
    if len(answer) < sampling.min_tokens:
        weights[sorted(EOS)] = -np.inf
    return weights


def expected(logits: torch.Tensor, sampling: Sampling, answer: tuple[int, ...]) -> np.ndarray:
    """The law by definition, in float64 numpy, one processor after another."""
    weights = processed(logits, sampling, answer) / sampling.temperature
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
    drafter = draft_proposer(FakeSetup(vocab_size=vocab, eos_ids=EOS), laws)
    view = SequenceView(0, KNOWN, len(PROMPT), len(KNOWN) - 1, sampling, "ratio", "", None, k, 50)
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
            answer = ANSWER + offer.tokens[:slot]
            law = dense(offer, slot, vocab)
            np.testing.assert_allclose(law, expected(laws(PROMPT + answer), SHAPES[shape], answer), atol=2e-6)
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
