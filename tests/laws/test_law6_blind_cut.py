"""Law 6: whether a draft token is verified never depends on that token.

`ratio` is exact only then. Everything that cuts drafts is at work here (adaptive lengths, small
budgets, few blocks, shared rows) and the joint law has to hold; a cut that looks at the token is
planted, and has to be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.draft.proposer import Proposer
from cluster.messages import Knobs, Offer
from cluster.request import Request, Sampling
from cluster.verify.judge import Judge
from tests.fakes import FakeSetup, SampledProposer, draft_proposer, fake_engine, ngram, run
from tests.laws.chi_square import LEAST_P, SPAN, ChainLaws, windows_p_value

VOCAB = 3
TARGET = ChainLaws(((0.2, 0.5, 0.3), (0.45, 0.25, 0.3), (0.3, 0.3, 0.4)))
DRAFT = ChainLaws(((0.3, 0.4, 0.3), (0.3, 0.3, 0.4), (0.4, 0.35, 0.25)))
ANSWER = 8 * SPAN
COUNT = 400

SMALL = FakeSetup(
    vocab_size=VOCAB,
    block_tokens=4,
    num_blocks=60,
    max_sequences=16,
    max_waiting=COUNT,
    eos_ids=frozenset(),
    prefix=False,
    knobs=Knobs(k=4, rule="ratio", token_budget=36, adaptive=True),
)


def makers(name: str) -> list[Proposer]:
    return {
        "sampled": lambda: [SampledProposer((0.2, 0.3, 0.5))],
        "model": lambda: [draft_proposer(SMALL, DRAFT)],
        "model, few blocks": lambda: [draft_proposer(SMALL, DRAFT, num_blocks=20)],
        "lookup, then model": lambda: [ngram(), draft_proposer(SMALL, DRAFT)],
    }[name]()


def p_value(proposers: Sequence[Proposer]) -> tuple[float, int]:
    asked = [Request(str(n), (n % VOCAB,), Sampling(max_tokens=ANSWER, temperature=1.0, seed=n)) for n in range(COUNT)]
    engine = fake_engine(SMALL, TARGET, proposers)
    told = run(engine, asked)
    rows = [row for plan in engine._parts.runner.plans for row in plan.rows if row.offer is not None]
    cut = sum(row.drafts < len(row.offer.tokens) for row in rows)
    answers = [(request.prompt[-1], told[request.id].tokens) for request in asked]
    return windows_p_value(answers, TARGET.chances(1.0)), cut


@pytest.mark.parametrize("name", ["sampled", "model", "model, few blocks", "lookup, then model"])
def test_cuts_by_budget_blocks_room_and_control_keep_the_law(name: str) -> None:
    found, cut = p_value(makers(name))
    assert cut > 0
    assert found > LEAST_P


@pytest.mark.parametrize("name", ["sampled", "model"])
def test_an_offer_dropped_for_its_token_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Judge.admit
    monkeypatch.setattr(
        Judge, "admit", lambda self, offers: [offer for offer in original(self, offers) if offer.tokens[0] != 1]
    )
    assert p_value(makers(name))[0] < LEAST_P


@pytest.mark.parametrize("name", ["sampled", "model"])
def test_an_offer_cut_before_an_unlikely_token_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tempting heuristic: stop the draft where the drafter was not confident of what it drew."""
    original = Judge.admit

    def confident(self: Judge, offers: Sequence[Offer]) -> list[Offer]:
        kept = []
        for offer in original(self, offers):
            size = next((at for at, token in enumerate(offer.tokens) if token == 0), len(offer.tokens))
            if size:
                kept.append(replace(offer, tokens=offer.tokens[:size]))
        return kept

    monkeypatch.setattr(Judge, "admit", confident)
    assert p_value(makers(name))[0] < LEAST_P


def test_what_is_admitted_does_not_depend_on_honest_tokens() -> None:
    """Every token a law allows is admitted alike."""
    drafter = SampledProposer((0.2, 0.3, 0.5))
    engine = fake_engine(replace(SMALL, knobs=Knobs(k=3, rule="ratio", adaptive=False)), TARGET, [drafter])
    engine.submit(Request("r", (1,), Sampling(max_tokens=20)))
    engine.step()
    views = engine._parts.scheduler.views(engine.knobs)
    for _ in range(200):
        offers = drafter.propose(views, engine.knobs)
        assert engine._parts.judge.admit(offers) == offers
