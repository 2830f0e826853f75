"""Laws 3, 4 and 6 for a draft model that samples in its own way and stops when it is unsure.

Under `ratio` the answers have to follow the target's law, over 100,000 draws; a drafter that
misstates its law, or that looks at the token before it stops, has to be seen by the same test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.draft import drawing
from cluster.draft.candidates import Candidates
from cluster.draft.model import ModelProposer
from cluster.messages import DraftLaw, Knobs, Offer, SequenceView
from cluster.model.sample import Shape, probabilities, shape_logits
from cluster.request import Request, Sampling
from tests.fakes import FakeRunner, FakeSetup, fake_cache, fake_engine, run
from tests.laws.chi_square import LEAST_P, SPAN, ChainLaws, windows_p_value

VOCAB = 4
TARGET = ChainLaws(
    ((0.12, 0.40, 0.36, 0.12), (0.10, 0.14, 0.40, 0.36), (0.36, 0.12, 0.12, 0.40), (0.40, 0.36, 0.14, 0.10))
)
# Sure after 0 and 1, unsure after 2 and 3, so that drafts of every length occur.
DRAFT = ChainLaws(
    ((0.15, 0.45, 0.25, 0.15), (0.15, 0.10, 0.50, 0.25), (0.28, 0.22, 0.24, 0.26), (0.27, 0.26, 0.24, 0.23))
)
ANSWER = 8 * SPAN
FULL = 4_200  # answers; x ANSWER = 100,800 draws
PLANTED = 400
TEMPERATURE = 0.8
SETUP = FakeSetup(
    vocab_size=VOCAB,
    block_tokens=8,
    num_blocks=1600,
    max_sequences=256,
    max_waiting=FULL,
    eos_ids=frozenset(),
    prefix=False,
    knobs=Knobs(k=4, rule="ratio", token_budget=4096, adaptive=False),
)
WAYS = {
    "own temperature and top-p, stops by the likeliest": Candidates(1.6, None, 0.92, 15, 0.35, "top"),
    "own top-k, stops by entropy": Candidates(None, 3, None, 15, 0.49, "entropy"),
    "greedy on its own": Candidates(temperature=0.0, most=2),
}


def drafter(candidates: Candidates) -> ModelProposer:
    runner = FakeRunner(DRAFT, VOCAB, 1600, SETUP.block_tokens)
    return ModelProposer(runner, fake_cache(SETUP, 1600), SETUP.max_context, candidates)


def p_value(proposer: ModelProposer, count: int) -> tuple[float, set[int]]:
    """And the lengths of the drafts that were verified."""
    asked = [
        Request(str(n), (n // VOCAB % VOCAB, n % VOCAB), Sampling(max_tokens=ANSWER, temperature=TEMPERATURE, seed=n))
        for n in range(count)
    ]
    engine = fake_engine(SETUP, TARGET, [proposer])
    told = run(engine, asked)
    lengths = {row.drafts for plan in engine._parts.runner.plans for row in plan.rows}
    answers = [(request.prompt[-1], told[request.id].tokens) for request in asked]
    return windows_p_value(answers, TARGET.chances(TEMPERATURE)), lengths


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("way", "count"), [(way, FULL if n == 0 else 800) for n, way in enumerate(WAYS)])
def test_the_targets_law_holds_whatever_the_drafters_own(way: str, count: int) -> None:
    found, lengths = p_value(drafter(WAYS[way]), count)
    assert found > LEAST_P
    assert lengths >= ({0, 1, 2, 3, 4} if WAYS[way].min_confidence else {1, 2})


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].min_confidence])
def test_a_stop_that_looks_at_the_token_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tempting heuristic: draw first, then drop what was not likely."""
    honest = drawing.Draft.offer

    def picky(self: drawing.Draft, source: str) -> Offer:
        offer = honest(self, source)
        assert offer.law is not None
        law = offer.law
        chance = [float(law.probs[n][law.ids[n] == token].sum()) for n, token in enumerate(offer.tokens)]
        size = next((n for n, q in enumerate(chance) if q < 0.28), len(offer.tokens))
        return replace(offer, tokens=offer.tokens[:size])

    monkeypatch.setattr(drawing.Draft, "offer", picky)
    assert p_value(drafter(WAYS[way]), PLANTED)[0] < LEAST_P


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].min_confidence])
def test_a_law_shaped_as_the_request_asks_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts are drawn in the drafter's way and shipped with the law of another."""
    honest: Callable[..., torch.Tensor] = drawing._note_law

    def careless(draft: object, shaped_V: torch.Tensor) -> torch.Tensor:
        cut = honest(draft, shaped_V)
        draft.probs[-1] = draft.probs[-1] ** 2 / (draft.probs[-1] ** 2).sum()  # type: ignore[attr-defined]
        return cut

    monkeypatch.setattr(drawing, "_note_law", careless)
    assert p_value(drafter(WAYS[way]), PLANTED)[0] < LEAST_P


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].min_confidence])
def test_the_law_shipped_is_the_drafters_own(way: str) -> None:
    """Law 4, by definition: temperature, top-k and top-p of the drafter, of each position's logits."""
    sampling = Sampling(50, temperature=TEMPERATURE, seed=5)
    shown = SequenceView(0, [1, 0], 2, 1, sampling, "ratio", "", None, 4, 50)
    made = drafter(WAYS[way])
    made.open(shown)
    (offer,) = made.propose([shown], SETUP.knobs)
    law = offer.law
    assert isinstance(law, DraftLaw)
    own = WAYS[way].sampling(sampling)
    known = [1, 0]
    for position, token in enumerate(offer.tokens):
        shape = Shape.of([own])
        wanted = probabilities(shape_logits(DRAFT(known)[None], shape), shape)[0].numpy()
        shipped = np.zeros(VOCAB)
        np.add.at(shipped, law.ids[position], law.probs[position])
        np.testing.assert_allclose(shipped, wanted, atol=1e-7)
        known.append(token)


def test_it_stops_before_the_token_it_is_unsure_of() -> None:
    """Greedy from 0: 1, then 2, and after 2 nothing is likely."""
    candidates = Candidates(min_confidence=0.4)
    shown = SequenceView(0, [0], 1, 0, Sampling(50, temperature=0.0), "coupled", "", None, 4, 50)
    made = drafter(candidates)
    made.open(shown)
    assert [offer.tokens for offer in made.propose([shown], SETUP.knobs)] == [(1, 2)]
    unsure = replace(shown, id=1, tokens=[3])
    made.open(unsure)
    assert made.propose([unsure], SETUP.knobs) == []
