"""Which offers are admitted, and what a flight's logits must be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.errors import BrokenInvariant
from cluster.messages import DraftLaw, Knobs, Offer, Plan, PlanRow
from cluster.model.runner import Flight
from cluster.request import Request, Sampling, Speculation
from cluster.verify.judge import Judge

VOCAB = 5
PROMPT = (1, 2, 3)


def judge(sampling: Sampling | None = None, speculation: Speculation | None = None) -> Judge:
    made = Judge(VOCAB, frozenset({0}), None)
    made.open(7, Request("r", PROMPT, sampling or Sampling(20, temperature=0.0), speculation or Speculation()))
    return made


def law(probs: list[list[float]], ids: list[list[int]] | None = None) -> DraftLaw:
    table = np.array(probs, dtype=np.float64)
    return DraftLaw(np.tile(np.arange(table.shape[1]), (len(table), 1)) if ids is None else np.array(ids), table)


GOOD = Offer(7, 3, (1, 2))


@pytest.mark.parametrize(
    "offer",
    [
        GOOD,
        replace(GOOD, law=law([[0.1, 0.9, 0.0], [0.2, 0.2, 0.6]])),
        replace(GOOD, law=law([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], [[1, 4], [2, 0], [3, 3]])),  # rows to spare
    ],
)
def test_sound_offers_are_admitted(offer: Offer) -> None:
    assert judge().admit([offer]) == [offer]


@pytest.mark.parametrize(
    "offer",
    [
        replace(GOOD, sequence=8),
        replace(GOOD, base_len=2),
        replace(GOOD, base_len=4),
        replace(GOOD, tokens=()),
        replace(GOOD, tokens=(1, 5)),
        replace(GOOD, tokens=(-1, 1)),
        replace(GOOD, law=law([[0.1, 0.9, 0.0]])),  # a row short
        replace(GOOD, law=law([[0.1, 0.8, 0.0], [0.2, 0.2, 0.6]])),  # sums to 0.9
        replace(GOOD, law=law([[0.1, 0.9, 0.0], [0.2, 0.8, 0.0]])),  # its own token is impossible
        replace(GOOD, law=law([[-0.1, 1.1, 0.0], [0.2, 0.2, 0.6]])),
        replace(GOOD, law=law([[float("nan"), 1.0, 0.0], [0.2, 0.2, 0.6]])),
        replace(GOOD, law=law([[0.5, 0.5], [0.5, 0.5]], [[1, 5], [2, 0]])),
        replace(GOOD, law=law([[0.5, 0.5], [0.5, 0.5]], [[1, -1], [2, 0]])),
        replace(GOOD, law=DraftLaw(np.array([[1], [2]]), np.array([[0.5, 0.5], [0.5, 0.5]]))),
    ],
)
def test_unsound_offers_are_dropped_whole(offer: Offer) -> None:
    assert judge().admit([offer]) == []


def test_the_first_sound_offer_of_a_sequence_wins() -> None:
    second = replace(GOOD, tokens=(4,))
    assert judge().admit([replace(GOOD, base_len=9), GOOD, second]) == [GOOD]


def flight(made: Judge, drafts: tuple[int, ...], best: list[int]) -> list:
    """Verdicts on a row whose target would say `best`."""
    row = PlanRow(7, 2, (3, *drafts), (0,), drafts=len(drafts), wants=len(drafts) + 1)
    plan = Plan(1, (row,), Knobs())
    return made.rule(Flight(plan, torch.eye(VOCAB)[best] * 9), made.prepare(plan))


def test_a_verdict_is_accepted_drafts_and_one_more() -> None:
    (verdict,) = flight(judge(), (1, 2), [1, 4, 3])
    assert (verdict.accepted, verdict.tokens, verdict.finish) == (1, (1, 4), None)


def test_what_was_told_moves_the_base() -> None:
    made = judge()
    flight(made, (1, 2), [1, 4, 3])
    assert made.admit([GOOD]) == []
    assert made.admit([replace(GOOD, base_len=5)]) != []


def test_eos_inside_accepted_drafts_ends_the_answer() -> None:
    (verdict,) = flight(judge(), (1, 0, 2), [1, 0, 2, 3])
    assert (verdict.accepted, verdict.tokens, verdict.finish) == (2, (1, 0), "stop")


@pytest.mark.parametrize("shape", [(2, VOCAB), (3, VOCAB + 1), (0, VOCAB)])
def test_logits_of_another_shape_are_named(shape: tuple[int, int]) -> None:
    made = judge()
    row = PlanRow(7, 2, (3, 1, 2), (0,), drafts=2, wants=3)
    plan = Plan(1, (row,), Knobs())
    with pytest.raises(BrokenInvariant, match="logits of shape"):
        made.rule(Flight(plan, torch.zeros(shape)), made.prepare(plan))


def test_a_plan_without_wants_has_no_verdicts() -> None:
    made = judge()
    plan = Plan(1, (PlanRow(7, 0, (1, 2), (0,)),), Knobs())
    assert made.rule(Flight(plan, torch.zeros(0, VOCAB)), made.prepare(plan)) == []


def test_the_requests_rule_goes_before_the_knobs() -> None:
    made = judge(speculation=Speculation(rule="ratio"))
    plan = Plan(1, (PlanRow(7, 2, (3,), (0,), wants=1),), Knobs(rule="coupled"))
    assert made.prepare(plan).rows[0].rule == "ratio"


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    """Found here: topk of 20 over a smaller vocabulary ended the engine."""
    (verdict,) = flight(judge(Sampling(20, temperature=0.0, logprobs=20)), (), [1])
    assert len(verdict.logprobs[0].top) == VOCAB


def test_closing_is_once_and_for_all() -> None:
    made = judge()
    made.close(7)
    made.close(7)
    assert made.admit([GOOD]) == []
