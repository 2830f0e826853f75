"""Measurements beside predictions: what the table says follows from the numbers in it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cluster.errors import ConfigError
from cluster.model.emulated import Acceptance, StepTimes
from deploy.simulation.measure import Measurement, Round
from deploy.simulation.playback import Played
from deploy.simulation.predict import best_k, predict
from deploy.simulation.report import Cell, Death, Report
from deploy.simulation.scenario import Mode, Scenario

SCENARIO = Scenario(StepTimes.parse("8:20,256:60"), StepTimes.parse("2"), Acceptance((0.8,)), target_devices=4)


def rounds(count: int, tokens: int, step_s: float, **other: float) -> list[Round]:
    parts = {"target_s": 0.02, "late_s": 0.0, "draft_s": 0.0, "rows": 1, "asked": 1, "offered": 1} | other
    return [Round(at_s=n * step_s, step_s=step_s, tokens=tokens, **parts) for n in range(count)]  # type: ignore[arg-type]


def cell(mode: Mode, tokens: int, step_s: float, scenario: Scenario = SCENARIO, **other: float) -> Cell:
    measured = Measurement.of(rounds(10, tokens, step_s, **other))
    return Cell(scenario, mode, 1, measured, predict(scenario, mode, 1), Played(tokens, 1.0))


def test_a_round_is_the_sum_of_its_parts() -> None:
    measured = Measurement.of(rounds(4, 3, 0.04, late_s=0.001, draft_s=0.015) + rounds(4, 1, 0.025, offered=0))
    assert measured.tokens_s == pytest.approx(16 / (4 * 0.04 + 4 * 0.025))
    assert (measured.tokens, measured.hit, measured.rounds) == (2.0, 0.5, 8)
    assert measured.round_ms == pytest.approx(32.5)
    parts = measured.target_ms + measured.late_ms + measured.draft_ms + measured.engine_ms
    assert parts == pytest.approx(measured.round_ms)
    assert measured.plane_ms == pytest.approx(15)


def test_predictions_of_drafting_in_turns() -> None:
    plain, turns = predict(SCENARIO, "none", 1), predict(SCENARIO, "colocated", 1)
    assert plain.tokens_s == pytest.approx(50)
    assert turns.round_ms == pytest.approx(20 + 7 * 2)
    assert turns.tokens_s == pytest.approx(4.1611 / 0.034, rel=1e-4)
    assert predict(SCENARIO, "colocated", 32).target_ms == pytest.approx(60)
    dear = replace(SCENARIO, draft=StepTimes.parse("10"))
    assert best_k(dear, "colocated", 1) < best_k(SCENARIO, "colocated", 1)


def test_predictions_of_drafting_ahead() -> None:
    turns, ahead, one = (predict(SCENARIO, mode, 1) for mode in ("sync", "lookahead", "pearl"))
    assert one.hit < ahead.hit < 1
    assert turns.tokens_s < one.tokens_s < ahead.tokens_s
    assert ahead.tokens == pytest.approx(ahead.hit * 4.1611 + 1 - ahead.hit, rel=1e-4)
    assert (ahead.target_ms, ahead.draft_ms) == (pytest.approx(20), 0)
    slow = predict(replace(SCENARIO, draft=StepTimes.parse("3")), "lookahead", 1)
    assert slow.round_ms == pytest.approx(8 * 3)
    crowded = predict(SCENARIO, "lookahead", 32)
    assert crowded.hit < ahead.hit  # the same rows for more sequences
    assert 23.9 < crowded.target_ms < 60


def test_a_difference_is_named_by_what_it_is_made_of() -> None:
    told = cell("colocated", 2, 0.04, draft_s=0.0145).because()
    assert told.startswith("luck of the text -52%, engine +5.5 ms, drafting +0.5 ms")
    exact = cell("none", 1, 0.02).because()
    assert exact == "nothing worth a word"


def test_a_wider_target_takes_its_share() -> None:
    wider = SCENARIO.wider(None, 0.8)
    assert wider.target_devices == 5
    assert wider.target.ms(8) == pytest.approx(20 / 1.2)
    assert SCENARIO.wider(StepTimes.parse("17"), 0.8).target.ms(8) == 17
    with pytest.raises(ConfigError, match="efficiency"):
        SCENARIO.wider(None, 1.5)


def test_a_draft_device_is_weighed_against_a_wider_target() -> None:
    apart, given = cell("sync", 3, 0.03), cell("none", 1, 0.025, SCENARIO.wider(None, 0.8))
    told = Report([cell("none", 1, 0.02), apart], [given]).answers()
    assert "5 devices, drafts apart (sync), give 100 tokens/s, all given to the target (none) 40" in told[-1]
    assert told[-1].endswith("worth more, x2.50")


def test_a_death_is_told_beside_no_drafts() -> None:
    death = Death.of(rounds(5, 1, 0.025, offered=0))
    died = replace(cell("sync", 3, 0.03), death=death)
    told = Report([cell("none", 1, 0.02), died], []).answers()[-1]
    assert "100 tokens/s, 40 after the drafters were killed (none: 50); longest round then 25 ms" in told


def test_speeds_are_compared_within_a_batch() -> None:
    report = Report([cell("none", 1, 0.02), cell("colocated", 3, 0.03)], [])
    document = json.loads(json.dumps(report.document()))
    plain, turns = document["cells"]
    assert turns["over_none"] == pytest.approx(2.0)
    assert plain["over_none"] == 1.0
    assert turns["tokens_s_device"] == pytest.approx(25)
    head, *lines = report.lines()
    assert head.split()[:3] == ["batch", "mode", "k"]
    assert len(lines) >= 3
    assert any("best k" in line for line in lines)


@pytest.mark.parametrize("wrong", [{"k": 0}, {"target_devices": 0}, {"drafters": 0}, {"seconds": 0}, {"seconds": 601}])
def test_a_scenario_out_of_range_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(SCENARIO, **wrong)
