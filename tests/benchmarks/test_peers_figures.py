"""Figures, goals, the page and the pictures of `outrider bench`, out of turns made by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import plots
from benchmarks.peers.figures import Spread, decoding, lines, percentile, speed
from benchmarks.peers.goals import Goal, verdicts
from benchmarks.peers.table import Page, markdown
from benchmarks.peers.turns import Turn


def turn(contender: str, seconds: float, at: tuple[int, int] = (0, 0), *, cell: str = "code x1") -> Turn:
    """Four tokens: one at a quarter of the time, two at half, one at the end."""
    times = ((seconds / 4, 1), (seconds / 2, 2), (seconds, 1))
    return Turn("smollm2", cell, at, contender, ((1, 2, 3, 4),), (times,), seconds)


OURS, THEIRS = "outrider none", "vllm none"


def test_speeds_count_the_prompt_and_decoding_does_not() -> None:
    one = turn(OURS, 2.0)
    assert speed(one) == 2.0
    assert decoding(one) == pytest.approx(3 / 1.5)
    assert decoding(replace(one, times=(((2.0, 4),),))) is None, "all arrived at once"


def test_percentiles_are_values_that_were_seen() -> None:
    assert [percentile([4, 1, 3, 2], share) for share in (0.25, 0.5, 0.95, 1.0)] == [1, 2, 4, 4]


def test_ratios_are_taken_within_turns() -> None:
    turns = [turn(OURS, 1.0, (0, 0)), turn(THEIRS, 2.0, (0, 0)), turn(OURS, 10.0, (0, 1)), turn(THEIRS, 20.0, (0, 1))]
    ours, theirs = lines([*turns, turn(THEIRS, 1.0, (1, 0))], OURS)
    assert (ours.contender, theirs.contender) == (OURS, THEIRS)
    assert theirs.ratio == Spread(0.5, 0.5, 0.5, 2), "the turn that ours did not play counts for the speed alone"
    assert theirs.speed.count == 3
    assert theirs.first == (0.5, 5.0)
    assert theirs.gaps is not None
    assert theirs.same == 1.0


def test_a_turn_with_a_looping_answer_is_left_out_of_the_loop_free_ratio() -> None:
    stuck = replace(turn(THEIRS, 1.0, (0, 1)), answers=((7,) * 30,))
    turns = [turn(OURS, 1.0, (0, 0)), turn(THEIRS, 2.0, (0, 0)), turn(OURS, 1.0, (0, 1)), stuck]
    theirs = lines(turns, OURS)[1]
    assert (theirs.ratio, theirs.loop_free) == (Spread(4.0, 0.5, 7.5, 2), Spread(0.5, 0.5, 0.5, 1))
    assert (theirs.looping, theirs.same) == (0.5, 0.5)


def goal(wanted: float, *, first_tokens: bool = False) -> Goal:
    ours, theirs = (lambda name: name.startswith("outrider")), (lambda name: name.startswith("vllm"))
    return Goal("ours over theirs", "smollm2", ("code x1",), ours, theirs, wanted, first_tokens)


def test_a_goal_compares_the_fastest_of_each_side() -> None:
    turns = [turn(OURS, 2.0), turn("outrider blend", 1.0), turn(THEIRS, 2.0), turn("vllm ngram", 1.5)]
    (seen,) = verdicts(turns, [goal(1.4)])
    assert (seen.seen, seen.reached, seen.sides) == (pytest.approx(1.5), True, "outrider blend / vllm ngram")
    assert verdicts(turns, [goal(1.6)])[0].reached is False


def test_less_is_better_for_first_tokens() -> None:
    (seen,) = verdicts([turn(OURS, 2.0), turn(THEIRS, 1.0)], [goal(1.1, first_tokens=True)])
    assert (seen.seen, seen.reached, seen.wanted) == (pytest.approx(2.0), False, "<= 1.1")


def test_contenders_of_different_shifts_are_compared_by_what_each_is_to_none_in_its_own() -> None:
    turns = [
        turn(OURS, 2.0, (0, 0)), turn("outrider blend", 1.0, (0, 0)),  # the machine is twice as fast later
        turn(OURS, 1.0, (1, 0)), turn("vllm ngram", 1.0, (1, 0)),
    ]  # fmt: skip
    drafts = replace(goal(1.0), over=lambda name: name == "outrider blend")
    assert verdicts(turns, [drafts])[0].seen == pytest.approx(2.0)


def test_a_goal_nobody_played_for_is_not_reached_nor_missed() -> None:
    assert [(v.seen, v.reached) for v in verdicts([turn(OURS, 1.0)], [goal(1.0)])] == [(None, None)]
    assert verdicts([], [goal(1.0)]) == []


@pytest.fixture
def page() -> Page:
    turns = [turn(OURS, 1.0), turn(THEIRS, 2.0), turn(OURS, 1.0, cell="batch 8"), turn(OURS, 3.0, cell="batch 64")]
    return Page(
        facts=[("command", "`outrider bench`")],
        lines=lines(turns, OURS),
        verdicts=verdicts(turns, [goal(1.25)]),
        memory={"smollm2": {OURS: {"peak": 2**30, "now": 2**29}}},
        weights={OURS: "bfloat16", THEIRS: "bfloat16"},
        out={"smollm2": {"llama.cpp none": "it is not installed"}},
        curves=frozenset({("smollm2", "batch 8"), ("smollm2", "batch 64")}),
    )


def test_the_page_says_what_was_measured_and_what_was_not(page: Page) -> None:
    text = markdown(page)
    assert "| ours over theirs | >= 1.25 | 2.00 | yes | outrider none / vllm none |" in text
    assert "| code x1 | vllm none | bfloat16 | 2.0 | 0.50 (0.50 to 0.50, 1) |" in text
    assert "| batch | 8 | 64 |" in text, "points of a curve are columns, in order"
    assert "| outrider none | 1024 | 512 |" in text
    assert "- smollm2, llama.cpp none: it is not installed" in text


def test_pictures_are_written(page: Page, tmp_path: Path) -> None:
    made = plots.draw(page.lines, page.curves, tmp_path)
    assert [path.name for path in made] == ["smollm2-speed.png", "smollm2-batch.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_without_matplotlib_pictures_are_refused(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError):
        plots.draw(page.lines, page.curves, tmp_path)
