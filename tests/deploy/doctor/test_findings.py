"""What the doctor says of figures."""

from __future__ import annotations

from dataclasses import replace

from cluster.control.steptime import StepTable
from deploy.doctor.findings import Figures, advice, best, own_device
from deploy.doctor.trials import Run, Sameness, Trial

TABLE = StepTable((1, 2, 16, 64), (0.010, 0.010, 0.012, 0.030))
GOOD = Trial("model", 1, 4, 1.8, 2.9, (0.8, 0.8, 0.8, 0.8))
FIGURES = Figures(
    table=TABLE,
    floor_s=0.007,
    sameness=(Sameness("in a batch", 8, 8),),
    trials=(GOOD, replace(GOOD, batch=8, ratio=1.2)),
    draft_step_s={"model": 0.002},
    kernels=True,
    k=4,
)


def test_a_healthy_machine_is_left_alone() -> None:
    assert advice(FIGURES) == ["nothing to change"]


def test_answers_that_differ_come_first() -> None:
    sick = replace(FIGURES, sameness=(Sameness("with model", 5, 8),), floor_s=0.001)
    assert "with model differ" in advice(sick)[0]
    assert "3 of 8" in advice(sick)[0]
    assert "10.0 times what reading the weights takes" in advice(sick)[1]


def test_missing_kernels_explain_slow_steps() -> None:
    assert "C++ compiler" in advice(replace(FIGURES, kernels=False, floor_s=0.001))[0]
    assert len(advice(replace(FIGURES, kernels=False, floor_s=0.001))) == 1


def test_a_draft_that_never_pays_is_to_go_and_one_that_pays_somewhere_stays() -> None:
    loser = (Trial("suffix", 1, 4, 0.8, 1.0, ()), Trial("suffix", 8, 4, 0.7, 1.0, ()))
    assert "suffix never paid" in advice(replace(FIGURES, trials=FIGURES.trials + loser))[0]
    some = (loser[0], replace(loser[1], ratio=1.1))
    assert advice(replace(FIGURES, trials=FIGURES.trials + some)) == ["nothing to change"]


def test_another_length_is_named_only_for_a_real_gain() -> None:
    longer = replace(GOOD, k=8, ratio=1.82)
    assert advice(replace(FIGURES, trials=(*FIGURES.trials, longer))) == ["nothing to change"]
    told = advice(replace(FIGURES, trials=(*FIGURES.trials, replace(longer, ratio=2.4))))
    assert "k: 8 was the best length" in told[0]


def test_no_drafts_at_all() -> None:
    assert "drafts is empty" in advice(replace(FIGURES, trials=(), draft_step_s={}))[0]
    assert best((), 1) is None


def test_a_device_of_its_own_hides_the_draft_behind_the_target() -> None:
    speed_ups = own_device(FIGURES, GOOD)
    assert speed_ups is not None
    turns, apart = speed_ups
    assert 1.0 < turns < apart
    # A draft that costs nothing gains nothing by moving, and misses cost: it is better where it is.
    free = own_device(replace(FIGURES, draft_step_s={"model": 1e-9}), GOOD)
    assert free is not None
    assert free[0] > free[1]
    assert own_device(FIGURES, replace(GOOD, method="ngram")) is None


def test_acceptance_by_position_is_of_those_whose_turn_came() -> None:
    run = Run(((1, 2),), 1.0, 20, (20, 20, 12, 4), (10, 5, 4, 1))
    assert run.alphas == (0.5, 0.5, 0.8, 0.25)
    assert Run(((1,),), 1.0, 3, (3, 3), (1, 0)).alphas == ()
