"""How drafting models draw: with the request's own penalties, biases and masks, in the ids both models share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.draft.candidates import Candidates
from cluster.draft.drawing import Draft, Drawing
from cluster.messages import SequenceView
from cluster.model.processors import Vocabulary
from cluster.request import Request, Sampling
from tests.fakes import LETTERS, FakeSetup, HashedLaws, draft_proposer, fake_engine, run

LAWS = HashedLaws(12)
GREEDY = Sampling(60, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    "wish",
    [
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 2.0, "presence_penalty": 0.5},
        {"logit_bias": {3: 4.0, 7: -100.0}},
        {"allowed_ids": (1, 4, 5, 8)},
        {"bad_ids": ((2,), (4, 5))},
        {"bad_words": ("b", "ef")},
        {"min_tokens": 50, "ignore_eos": False},
        {"thinking_tokens": 20, "think_end": (3, 3, 1)},
    ],
    ids=lambda wish: next(iter(wish)),
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_of_the_same_law_is_never_refused_for_what_was_asked(wish: dict[str, Any], temperature: float) -> None:
    """Shown the wish, it guesses what the target says; the same wish was refused draft after draft when it was not."""
    setup = FakeSetup(num_blocks=80)
    request = Request("r", (1, 2, 3, 4), replace(GREEDY, temperature=temperature, **wish))
    told = run(fake_engine(setup, LAWS, [draft_proposer(setup, LAWS)], text=True), [request])["r"].deltas[-1].statistics
    assert told.accepted == told.drafted > 30


def drawing(model_vocab: int, vocab_size: int, **fields: Any) -> tuple[Drawing, Draft]:
    made = Drawing(Candidates(), model_vocab, vocab_size, Vocabulary(frozenset({0}), LETTERS))
    sampling = replace(GREEDY, **fields)
    return made, made.begin(SequenceView(0, [1, 2, 1], 2, 2, sampling, "coupled", "", None, 4, 50))


def test_ids_that_only_one_model_has_are_never_drawn() -> None:
    made, draft = drawing(8, 5)
    made.extend(torch.tensor([[0.0, 1, 2, 3, 4, 9, 9, 9]]), [draft])
    assert draft.tokens == [4]
    made, draft = drawing(5, 8, logit_bias={7: 100.0, 2: 3.0})  # a wish for a token that the draft does not know
    made.extend(torch.tensor([[0.0, 1, 2, 3, 4]]), [draft])
    assert draft.tokens == [2]


@pytest.mark.parametrize("wish", [{"allowed_ids": (6, 7)}, {"thinking_tokens": 1, "think_end": (7,)}])
def test_where_only_the_target_knows_what_may_follow_it_stops(wish: dict[str, Any]) -> None:
    made, draft = drawing(5, 8, **wish)
    made.extend(torch.zeros(1, 5), [draft])
    assert draft.stopped
    assert draft.done
    assert draft.tokens == []


def test_what_was_drafted_counts_until_it_is_known_otherwise() -> None:
    made, draft = drawing(4, 4, frequency_penalty=2.0)
    for _ in range(2):
        made.extend(torch.tensor([[0.0, 3.0, 2.5, 0.0]]), [draft])
    assert draft.tokens == [2, 1]  # 1 was said once: 3 - 2; then 2 was drafted: 2.5 - 2
    again = made.begin(replace(draft.view, tokens=[1, 2, 1, 3]))
    made.extend(torch.tensor([[0.0, 3.0, 2.5, 0.0]]), [again])
    assert again.tokens == [2]
    other = made.begin(replace(draft.view, tokens=[1, 2, 2]))  # what was thought known was not
    made.extend(torch.tensor([[0.0, 3.0, 2.5, 0.0]]), [other])
    assert other.tokens == [1]


def test_processors_of_the_server_stay_with_the_target() -> None:
    made, draft = drawing(4, 4, logits_processors=("mine",))
    made.extend(torch.tensor([[0.0, 3.0, 2.5, 0.0]]), [draft])
    assert draft.tokens == [1]
