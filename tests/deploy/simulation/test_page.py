"""The commands of docs/simulate.md run, on one sequence and for a moment each."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from deploy.cli import main

PAGE = (Path(__file__).resolve().parents[3] / "docs/simulate.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for shell in re.findall(r"^```sh\n(.*?)^```$", PAGE.replace("\\\n", " "), re.MULTILINE | re.DOTALL)
    for line in shell.splitlines()
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_page_can_be_followed(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(Path(__file__).resolve().parents[3] / "benchmarks")
    assert command[:2] == ["outrider", "simulate"]
    quick = ["--batches", "1", "--seconds", "0.3", *(["--kill-after", "0.15"] if "--kill-after" in command else [])]
    assert main([*command[1:], *quick]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 3
