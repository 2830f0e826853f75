"""How many tokens are drafted and verified: as many as pay, by what steps cost and what stood."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from cluster.control.length import LengthControl
from cluster.control.steptime import StepTable, StepTimes
from cluster.draft.paced import Paced
from cluster.messages import DraftLaw, Knobs, Load, Offer, Plan, PlanRow, SequenceView, Verdict
from cluster.request import Sampling

#: A GPU's: nothing until 64 tokens, then in proportion.
ROOFED = StepTable((1, 64, 128, 1024), (1.0, 1.0, 2.0, 16.0))
#: Every token costs.
STEEP = StepTable((1, 1024), (1.0, 1024.0))

#: Never pauses.
PATIENT = Knobs(k=8, max_retries=10**9)


def offer(sequence: int, count: int, *, source: str = "ngram", law: bool = False) -> Offer:
    made = DraftLaw(np.zeros((count, 1), np.int64), np.ones((count, 1))) if law else None
    return Offer(sequence, 5, (1,) * count, made, source)


def stood(drafts: int, alpha: float, coin: random.Random) -> int:
    """How many of a row's drafts stand, each with chance alpha given those before it."""
    return next((place for place in range(drafts) if coin.random() >= alpha), drafts)


def played(control: LengthControl, batch: int, alpha: float, rounds: int = 60, k: int = 8) -> list[int]:
    """Drafts verified a step."""
    verified, coin = [], random.Random(0)
    for number in range(rounds):
        offers = control.trim([offer(row, k) for row in range(batch)], Load(batch, batch))
        lengths = {made.sequence: len(made.tokens) for made in offers}
        rows = tuple(
            PlanRow(row, 5, (1,) * (n + 1), (), drafts=n, wants=n + 1)
            for row in range(batch)
            for n in [lengths.get(row, 0)]
        )
        verdicts = [Verdict(row.sequence, a, (1,) * (a + 1)) for row in rows for a in [stood(row.drafts, alpha, coin)]]
        control.update(Plan(number, rows, control.knobs), verdicts)
        verified.append(sum(lengths.values()))
    return verified


def test_all_is_verified_while_it_costs_nothing_and_less_where_it_does() -> None:
    few = played(LengthControl(PATIENT, StepTimes(ROOFED)), 1, 0.5)[-10:]
    many = played(LengthControl(PATIENT, StepTimes(ROOFED)), 64, 0.5)[-10:]
    assert sum(few) == 80
    assert sum(many) / 64 < 0.25 * sum(few), "a full step has no room for guesses"


def test_k_falls_with_the_batch_and_recovers_with_it() -> None:
    control = LengthControl(PATIENT, StepTimes(ROOFED))
    a_row = [sum(played(control, batch, 0.6)[-10:]) / batch / 10 for batch in (4, 16, 64, 256)]
    assert a_row[0] == 8 > a_row[1] > max(a_row[2:])
    assert max(a_row[2:]) < 0.1
    assert sum(played(control, 4, 0.6)[-10:]) / 40 == 8


def test_where_nothing_pays_a_probe_is_made_now_and_then() -> None:
    control = LengthControl(Knobs(k=8, max_retries=10**9), StepTimes(STEEP))
    verified = played(control, 4, 0.0, rounds=200)
    assert sum(verified[100:]) / 100 < 1.0
    assert any(verified[100:]), "never for good"
    assert max(verified[100:]) <= 4


def test_not_adaptive_verifies_all_that_is_offered() -> None:
    control = LengthControl(Knobs(k=8, adaptive=False, max_retries=10**9), StepTimes(STEEP))
    assert set(played(control, 8, 0.0)) == {64}


def test_a_sampled_offer_is_never_shortened_after_the_fact() -> None:
    """Its length might depend on its tokens (law 6); how many are drafted is decided before."""
    control = LengthControl(Knobs(k=8, max_retries=10**9), StepTimes(STEEP))
    played(control, 4, 0.0, rounds=100)
    made = control.trim([offer(0, 6, law=True), offer(1, 6)], Load(2, 2))
    assert [len(found.tokens) for found in made if found.sequence == 0] == [6]


def test_a_tree_is_cut_to_nodes_whose_parents_stay() -> None:
    control = LengthControl(Knobs(k=8), StepTimes(StepTable((1, 3, 4), (1.0, 1.0, 50.0))))
    tree = Offer(0, 5, (1, 2, 3, 4), None, "suffix", parents=(-1, -1, 0, 1))
    (made,) = control.trim([tree], Load(1, 1))
    assert (made.tokens, made.parents) == ((1, 2), (-1, -1))


class Timed:
    """Drafts k tokens for whoever asks, each pass taking pass_s of a clock of its own."""

    name, samples = "model", False

    def __init__(self, pass_s: float) -> None:
        self.now, self._pass_s, self.asked = 0.0, pass_s, {}  # type: ignore[var-annotated]

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        self.asked = {view.id: view.k for view in views}
        self.now += self._pass_s * max(self.asked.values())
        return [Offer(view.id, len(view.tokens), (1,) * view.k, None, "model") for view in views]

    def __getattr__(self, verb: str) -> object:
        return lambda *args: None


def view(sequence: int, k: int) -> SequenceView:
    return SequenceView(sequence, [1] * 5, 5, 4, Sampling(99), "coupled", "", None, k, 99)


def drafted(control: LengthControl, paced: Paced, drafter: Timed, alpha: float, rounds: int = 80) -> list[int]:
    """Tokens the model was asked for, round by round."""
    asked, coin = [], random.Random(0)
    for number in range(rounds):
        drafter.asked = {}
        offers = control.trim(paced.propose([view(0, control.knobs.k)], control.knobs), Load(1, 1))
        n = sum(len(made.tokens) for made in offers)
        row = PlanRow(0, 5, (1,) * (n + 1), (), drafts=n, wants=n + 1)
        accepted = stood(n, alpha, coin)
        control.update(Plan(number, (row,), control.knobs), [Verdict(0, accepted, (1,) * (accepted + 1))])
        asked.append(drafter.asked.get(0, 0))
    return asked


@pytest.mark.parametrize(("pass_s", "least", "most"), [(0.01, 14, 15), (0.3, 1, 8), (3.0, 0, 0)])
def test_a_model_drafts_as_far_as_its_passes_pay(pass_s: float, least: int, most: int) -> None:
    drafter = Timed(pass_s)
    paced = Paced(drafter, clock=lambda: drafter.now)  # type: ignore[arg-type]
    control = LengthControl(Knobs(k=15, max_retries=10**9), StepTimes(StepTable((1, 64), (1.0, 1.2))), [paced])
    asked = drafted(control, paced, drafter, 0.9)
    assert least <= sorted(asked[-20:])[10] <= most
    assert asked[0] == 15, "nothing is known at first"
    assert 0 in asked, "what a plain step takes is looked at too"


def test_two_models_of_one_kind_are_both_paced() -> None:
    drafters = [Timed(3.0), Timed(3.0)]
    paced = [Paced(drafter, lambda rows: 3.0) for drafter in drafters]  # type: ignore[arg-type]
    control = LengthControl(Knobs(k=15), StepTimes(StepTable((1, 64), (1.0, 1.2))), paced)
    row = PlanRow(0, 5, (1,), (), wants=1)
    control.update(Plan(0, (row,), control.knobs), [Verdict(0, 0, (1,))])
    for proposer in paced:
        assert proposer.propose([view(0, 15)], control.knobs) == []


def test_a_model_that_does_not_pay_is_tried_again_some_time() -> None:
    drafter = Timed(3.0)
    paced = Paced(drafter, clock=lambda: drafter.now)  # type: ignore[arg-type]
    control = LengthControl(Knobs(k=15, max_retries=10**9), StepTimes(StepTable((1, 64), (1.0, 1.2))), [paced])
    asked = drafted(control, paced, drafter, 0.9, rounds=300)
    assert 2 <= sum(count > 0 for count in asked[100:]) <= 6


def test_what_the_passes_take_is_learned() -> None:
    drafter = Timed(0.5)
    paced = Paced(drafter, pass_s=lambda rows: 0.1 * rows, clock=lambda: drafter.now)  # type: ignore[arg-type]
    for _ in range(100):
        paced.propose([view(0, 4)], Knobs())
    assert paced.pass_s(1) == pytest.approx(0.5, rel=0.06)


def test_caps_of_a_model_hold_until_it_is_told_otherwise() -> None:
    drafter = Timed(0.1)
    paced = Paced(drafter)  # type: ignore[arg-type]
    paced.limit({0: 2, 1: 0})
    paced.propose([view(0, 8), view(1, 8), view(2, 8)], Knobs())
    assert drafter.asked == {0: 2, 2: 8}
    assert Paced(drafter).pass_s(1) is None  # type: ignore[arg-type]
