"""The encoder-decoder that benchmarks train: a draft the engine takes, made from the target's own text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.proposers import main as proposers
from benchmarks.seq2seq_draft import batches, main


def test_a_draft_is_trained_and_drafts(tiny_llama: Path, tmp_path: Path) -> None:
    some = ["--count", "8", "--batch", "4", "--steps", "2", "--width", "32"]
    assert main([str(tmp_path / "draft"), "--target", str(tiny_llama), *some]) == 0
    common = ["--count", "1", "--tokens", "8", "--target", str(tiny_llama), "--out", str(tmp_path)]
    assert proposers(["counts", *common, "--seq2seq", str(tmp_path / "draft"), "--proposers", "none", "seq2seq"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "proposers.jsonl").read_text().splitlines()]
    drafted = [round[0] for row in rows if row["proposer"] == "seq2seq" for round in row["rounds"]]
    assert sum(drafted) > 0


def test_labels_beyond_an_answer_count_for_nothing() -> None:
    questions, labels = next(batches([((5, 6), (7, 8, 9)), ((5,), (7,))], 2, 1))
    assert sorted(questions.tolist()) == [[5, 1], [5, 6]]
    assert sorted(labels.tolist()) == [[7, -100, -100], [7, 8, 9]]


def test_a_batch_that_is_never_full_is_refused() -> None:
    with pytest.raises(SystemExit, match="1 conversations do not fill a batch of 2"):
        next(batches([((5,), (7,))], 2, 1))


def test_too_few_conversations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere", "--count", "3"])
    assert "--count 3" in capsys.readouterr().err
