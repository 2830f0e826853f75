"""A draft model over its own cache: always right, or known to be missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cluster.draft.model import ModelProposer
from cluster.messages import Knobs, Offer, SequenceView
from cluster.request import Sampling
from tests.fakes import FakeSetup, HashedLaws, draft_proposer

VOCAB = 12
LAWS = HashedLaws(VOCAB)
SETUP = FakeSetup(vocab_size=VOCAB)
GREEDY = Sampling(100, temperature=0.0)


def view(tokens: list[int], k: int = 3, sequence: int = 0, **fields: object) -> SequenceView:
    made = SequenceView(sequence, tokens, 3, len(tokens) - 1, GREEDY, "coupled", "", None, k, 100)
    return replace(made, **fields)  # type: ignore[arg-type]


def follow(tokens: list[int], k: int) -> tuple[int, ...]:
    """What a drafter without a cache would say."""
    known = list(tokens)
    for _ in range(k):
        known.append(int(LAWS(known).argmax()))
    return tuple(known[len(tokens) :])


def drafter(num_blocks: int = 64, *open_: int) -> ModelProposer:
    made = draft_proposer(SETUP, LAWS, num_blocks)
    for sequence in open_ or (0,):
        made.open(view([1, 2, 3], sequence=sequence))
    return made


def one(made: ModelProposer, shown: SequenceView, budget: int = 32) -> Offer | None:
    offers = made.propose([shown], Knobs(token_budget=budget))
    made._cache.check()
    return offers[0] if offers else None


def test_it_follows_its_own_argmax() -> None:
    offer = one(drafter(), view([1, 2, 3], k=5))
    assert offer is not None
    assert (offer.base_len, offer.tokens, offer.source) == (3, follow([1, 2, 3], 5), "model")


@pytest.mark.parametrize("stood", [0, 1, 2, 3])
def test_after_any_verdict_it_builds_on_what_is_known(stood: int) -> None:
    """Also where the target's own token is the one drafted next: verification was cut short."""
    for bonus in (*follow([1, 2, 3], 4)[stood : stood + 1], 0, 5, 9):
        made = drafter()
        tokens = [1, 2, 3]
        first = one(made, view(tokens))
        assert first is not None
        tokens += [*first.tokens[:stood], bonus]
        second = one(made, view(tokens))
        assert second is not None
        assert second.tokens == follow(tokens, 3)


def test_the_same_view_twice_gives_the_same_drafts() -> None:
    """The row was not planned for want of budget: nothing new is known."""
    made = drafter()
    assert one(made, view([1, 2, 3])) == one(made, view([1, 2, 3]))
    aligned = [1, 2, 3, 4, 5, 6, 7, 8]  # the newest token closes a block that is published by now
    assert one(made, view(aligned)) == one(made, view(aligned))


def test_a_long_prompt_is_taken_in_pieces_of_the_budget() -> None:
    made = drafter()
    tokens = [n % VOCAB for n in range(25)]
    assert [one(made, view(tokens), budget=10) is None for _ in range(3)] == [True, True, False]
    offer = one(made, view(tokens), budget=10)
    assert offer is not None
    assert offer.tokens == follow(tokens, 3)


def test_a_shared_prompt_is_computed_once() -> None:
    made = drafter(64, 0, 1)
    tokens = [n % VOCAB for n in range(17)]
    one(made, view(tokens))
    made._runner.plans.clear()  # type: ignore[attr-defined]
    offer = one(made, view(tokens, sequence=1))
    assert offer is not None
    assert offer.tokens == follow(tokens, 3)
    assert made._runner.plans[0].num_tokens == 1  # type: ignore[attr-defined]


def test_another_salt_shares_nothing() -> None:
    made = drafter(64, 0, 1)
    tokens = [n % VOCAB for n in range(17)]
    one(made, view(tokens, salt="a"))
    made._runner.plans.clear()  # type: ignore[attr-defined]
    one(made, view(tokens, sequence=1, salt="b"))
    assert made._runner.plans[0].num_tokens == 17  # type: ignore[attr-defined]


def test_too_few_blocks_is_fewer_drafts_never_a_wrong_one() -> None:
    made = drafter(3, 0, 1, 2)
    for sequence in (0, 1, 2, 0, 1, 2):
        tokens = [sequence, 1, 2, 3, 4, 5, 6]
        offer = one(made, view(tokens, k=8, sequence=sequence))
        assert offer is not None
        assert offer.tokens == follow(tokens, 8)[: len(offer.tokens)]
    together = [view([s, 1, 2, 3, 4, 5, 6], sequence=s) for s in range(3)]
    for offer in made.propose(together, Knobs()):
        assert offer.tokens == follow([offer.sequence, 1, 2, 3, 4, 5, 6], 3)[: len(offer.tokens)]
    assert one(made, view(list(range(12)) * 2)) is None  # more than the whole cache holds


def test_beyond_its_context_it_stays_silent() -> None:
    made = ModelProposer(drafter()._runner, drafter()._cache, max_context=10)
    made.open(view([1]))
    assert one(made, view([1] * 7)) is not None
    assert one(made, view([1] * 8)) is None


def test_it_draws_with_the_targets_noise_under_coupled() -> None:
    from cluster.model.sample import Shape, draw, noise_key, shape_logits

    sampling = Sampling(100, temperature=1.3, seed=5)
    offer = one(drafter(), view([1, 2, 3], sampling=sampling))
    assert offer is not None
    known = [1, 2, 3]
    shape = Shape.of([sampling])
    for token in offer.tokens:
        own = draw(shape_logits(LAWS(known)[None], shape), shape, [noise_key(5, len(known))])
        assert token == int(own[0])
        known.append(token)


def test_closing_returns_blocks_and_reopening_starts_clean() -> None:
    made = drafter()
    one(made, view([1, 2, 3]))
    made.close(0)
    made.close(0)
    made.close(99)
    assert made._cache.counts.owned == 0
    assert not made._states
    made.open(view([4, 5, 6]))
    offer = one(made, view([4, 5, 6]))
    assert offer is not None
    assert offer.tokens == follow([4, 5, 6], 3)


def test_rows_of_both_rules_side_by_side() -> None:
    made = drafter(64, 0, 1)
    warm = Sampling(100, temperature=1.0, seed=3)
    offers = made.propose(
        [view([1, 2, 3], sampling=warm, rule="ratio"), view([1, 2, 4], sequence=1, sampling=warm)], Knobs()
    )
    assert [offer.law is not None for offer in offers] == [True, False]
    assert torch.isfinite(torch.tensor(offers[0].law.probs)).all()  # type: ignore[union-attr]
