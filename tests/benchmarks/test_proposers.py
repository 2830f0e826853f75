"""The benchmark of proposers on a tiny model: it compares, resumes, and says when a token is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.proposers import main
from benchmarks.proposers_speed import markdown, speeds


@pytest.fixture
def common(tiny_llama: Path, tmp_path: Path) -> list[str]:
    some = ["--count", "2", "--tokens", "12", "--proposers", "none", "ngram", "recycling"]
    return ["--target", str(tiny_llama), "--out", str(tmp_path), *some]


def read(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "proposers.jsonl").read_text().splitlines()]


def table(tmp_path: Path) -> list[dict[str, object]]:
    (path,) = tmp_path.glob("proposers-*.json")
    found: list[dict[str, object]] = json.loads(path.read_text())["results"]["answers"]
    return found


@pytest.fixture
def counted(common: list[str], tmp_path: Path) -> list[dict[str, object]]:
    assert main(["counts", *common, "--temperatures", "0", "0.8"]) == 0
    return read(tmp_path)


def test_every_answer_is_made_once_and_compared_with_none(
    counted: list[dict[str, object]], common: list[str], tmp_path: Path
) -> None:
    # two files, two prompts, two temperatures, three contenders
    assert len(counted) == 24
    lines = table(tmp_path)
    assert {(line["kind"], line["temperature"], line["proposer"]) for line in lines} == {
        (kind, t, name) for kind in ("code", "chat") for t in (0.0, 0.8) for name in ("none", "ngram", "recycling")
    }
    assert all(line["prompts"] == line["compared"] == 2 and line["differing"] == [] for line in lines)
    assert main(["counts", *common, "--temperatures", "0", "0.8"]) == 0
    assert read(tmp_path) == counted, "nothing is made twice"


def test_an_interrupted_run_goes_on(counted: list[dict[str, object]], common: list[str], tmp_path: Path) -> None:
    path = tmp_path / "proposers.jsonl"
    kept = path.read_text().splitlines()
    path.write_text("\n".join(kept[:9]) + "\n" + kept[9][:40] + "\n")  # killed in the middle of a line
    assert main(["counts", *common, "--temperatures", "0", "0.8"]) == 0
    lines = path.read_text().splitlines()
    assert lines[:9] == kept[:9]
    assert len([line for line in lines if line.endswith("}")]) == 24


def test_a_wrong_token_fails_the_run(
    counted: list[dict[str, object]], common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(row for row in counted if row["proposer"] == "ngram" and row["temperature"] == 0.0)
    answer = list(row["answer"])  # type: ignore[call-overload]
    answer[5] += 1
    changed = [entry | {"answer": answer} if entry is row else entry for entry in counted]
    (tmp_path / "proposers.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in changed))
    assert main(["table", *common]) == 1
    assert f"WRONG: {{'prompt': '{row['prompt']}', 'position': 5" in capsys.readouterr().out


def test_timed_turns_give_a_ratio_to_none(common: list[str], tmp_path: Path) -> None:
    assert main(["timed", *common, "--minutes", "0.001", "--batches", "2", "--kinds", "code"]) == 0
    turns = [row for row in read(tmp_path) if row["what"] == "time"]
    assert {row["proposer"] for row in turns} == {"none", "ngram", "recycling"}
    (path,) = tmp_path.glob("proposers-*.json")
    entries = json.loads(path.read_text())["results"]["speeds"]
    (entry,) = [entry for entry in entries if entry["proposer"] == "ngram"]
    assert entry["batches"]["2"]["turns"] == len(turns) / 3


def turns_of(*speeds: tuple[str, int, float]) -> list[dict[str, object]]:
    """(proposer, repeat, tokens a second), all of one file and batch."""
    setting = {"what": "time", "kind": "code", "batch": 1, "temperature": 0.0, "draft": None, "k": 8, "tokens": 64}
    return [setting | {"proposer": name, "repeat": repeat, "speed": speed} for name, repeat, speed in speeds]


def test_a_ratio_is_taken_within_a_turn() -> None:
    made = turns_of(("none", 0, 10.0), ("none", 1, 40.0), ("ngram", 0, 20.0), ("ngram", 1, 40.0), ("ngram", 2, 99.0))
    alone, ngram = speeds(made)
    assert alone["batches"][1]["ratio"] == 1.0
    assert ngram["batches"][1] == {"speed": 30.0, "ratio": 1.5, "least": 1.0, "greatest": 2.0, "turns": 2}
    assert "| code | ngram | 8 | 30.0 | 1.50 (1.00 to 2.00, 2) |" in markdown([alone, ngram])
