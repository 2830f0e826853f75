"""Figures out of rounds, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import acceptance
from benchmarks.acceptance import Round, alphas, loops, main, tau
from deploy.simulation.pair import read_acceptance

ROUNDS = [Round(3, 3, 4), Round(3, 0, 1), Round(3, 1, 2), Round(0, 0, 1), Round(2, 2, 3)]


def test_a_position_counts_only_where_those_before_it_stood() -> None:
    assert alphas(ROUNDS, 4) == [3 / 4, 2 / 3, 1.0, None]


def test_a_draft_after_the_end_of_the_answer_neither_stood_nor_fell() -> None:
    assert alphas([Round(3, 1, 1)], 3) == [1.0, None, None]
    assert alphas([Round(3, 1, 2)], 3) == [1.0, 0.0, None]


def test_tau_counts_the_rounds_without_drafts_too() -> None:
    assert tau(ROUNDS) == pytest.approx(11 / 5)
    assert tau([]) == 0.0


def test_loops_are_ends_that_repeat() -> None:
    assert loops([9, 8, 7, *([1, 2, 3] * 8)])
    assert loops([5] * 24)
    assert not loops([5] * 23), "too short to tell"
    assert not loops([*([1, 2, 3] * 8), 9]), "it came out of it"
    assert not loops(list(range(100)))


def test_the_file_for_emulation_holds_acceptance_by_data_file(tmp_path: Path) -> None:
    row = {
        "what": "answer", "target": "a", "draft": "b", "dtype": "bfloat16", "k": 3, "temperature": 0.0,
        "proposer": "draft", "prompt": "code/0", "rounds": [[3, 3, 4], [3, 1, 2]],
    }  # fmt: skip
    other = [row | {"proposer": "none"}, row | {"k": 5}, {"what": "time"}, row | {"prompt": "chat/1", "rounds": []}]
    records = tmp_path / "proposers.jsonl"
    records.write_text("".join(json.dumps(entry) + "\n" for entry in [row, *other]))
    out = tmp_path / "acceptance.json"
    asked = ["--target", "a", "--draft", "b", "--k", "3", "--made-with", "this", "--out", str(out)]
    assert main([str(records), *asked]) == 0
    made = json.loads(out.read_text())
    assert (made["command"], made["k"]) == ("this", 3)
    assert made["acceptance"] == {"chat": [], "code": [1.0, 0.5, 1.0]}
    assert made["tau"] == {"chat": 0.0, "code": 3.0}
    assert made["answers"] == {"chat": 1, "code": 1}


@pytest.mark.parametrize("workload", ["code", "chat", "json"])
def test_the_measured_pair_is_what_simulations_read(workload: str) -> None:
    measured = read_acceptance(Path(acceptance.__file__).parent / "acceptance.json", workload)
    assert len(measured.alphas) == 8
    assert all(0.5 < alpha <= 1.0 for alpha in measured.alphas)
