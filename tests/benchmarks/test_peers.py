"""`outrider bench` with real engines in processes of their own, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers import command, find
from benchmarks.peers.arguments import PEERS
from benchmarks.peers.process import EngineLost, EngineProcess
from cluster.errors import ConfigError
from deploy.cli import main

PYTHON = Path(sys.executable)


@pytest.fixture
def transformers(tmp_path: Path) -> Iterator[EngineProcess]:
    environment = find.environment("transformers", PYTHON, 1)
    with EngineProcess(PYTHON, "transformers", environment, tmp_path / "log") as process:
        yield process


def settings(directory: Path, **more: object) -> dict[str, object]:
    return {"model": str(directory), "draft": None, "dtype": "float32", "threads": 1, **more}


def test_a_peer_answers_over_the_wire(transformers: EngineProcess, tiny_llama: Path) -> None:
    assert "transformers" in transformers.load(settings(tiny_llama, draft=str(tiny_llama)))
    asked = {"tokens": 6, "end": [0], "whole": True}
    batch = transformers.run(prompts=[[5, 6, 7], [8, 9]], **asked)["answers"]
    assert [len(answer["tokens"]) for answer in batch] == [6, 6]
    alone = transformers.run(prompts=[[5, 6, 7]], **asked)["answers"]
    for way in ({"lookup": 2}, {"assist": True}):
        assert transformers.run(prompts=[[5, 6, 7]], **asked, **way)["answers"][0]["tokens"] == alone[0]["tokens"]
    for answer in (*batch, *alone):
        assert sum(count for _, count in answer["times"]) == len(answer["tokens"])
        assert [at for at, _ in answer["times"]] == sorted(at for at, _ in answer["times"])
    first = alone[0]["tokens"][0]
    ended = transformers.run(prompts=[[5, 6, 7]], tokens=6, end=[first])["answers"][0]
    assert ended["tokens"] == [first], "an end token ends the answer and belongs to it"
    memory = transformers.memory()
    assert 0 < memory["now"] <= memory["peak"]


def test_an_engine_that_cannot_says_why_and_is_gone(transformers: EngineProcess, tmp_path: Path) -> None:
    with pytest.raises(EngineLost, match="nowhere"):
        transformers.load(settings(tmp_path / "nowhere"))
    with pytest.raises(EngineLost, match="ended with code 0"):
        transformers.memory()


def test_a_killed_engine_is_noticed_with_its_last_words(transformers: EngineProcess) -> None:
    pid = transformers._child.pid
    transformers.memory()
    transformers.pause()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match="ended with code -9; it said nothing"):
        transformers.memory()


def test_an_engine_that_keeps_silent_is_ended(transformers: EngineProcess) -> None:
    transformers.memory()
    transformers.pause()
    with pytest.raises(EngineLost, match="gave no answer within 1 s"):
        transformers.ask({"op": "memory"}, 1.0)
    assert transformers._child.poll() is not None


def test_an_engine_dies_with_its_driver(tmp_path: Path) -> None:
    script = f"""
import os, sys, time
from pathlib import Path
from benchmarks.peers.process import EngineProcess
process = EngineProcess(Path(sys.executable), "transformers", dict(os.environ), Path({str(tmp_path / "log")!r}))
process.memory()
print(process._child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        driver.kill()
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.1)


def test_the_command_measures_who_is_here_and_names_who_is_not(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "MODELS", {"smollm2": (str(tiny_llama), None)})
    monkeypatch.setattr(command, "_CONTEXT", 512)
    monkeypatch.chdir(tmp_path)  # no .venv-vllm here; and where it is installed beside the project, it is not asked for
    missing = find.Missing("vllm is nowhere")
    monkeypatch.setattr(find, "interpreter", lambda peer, _: missing if peer == "vllm" else PYTHON)
    asked = ["--contenders", "outrider blend", "transformers lookup", "vllm none", "--cells", "code x1", "k 3"]
    sized = ["--tokens", "8", "--repeats", "2", "--minutes", "2", "--threads", "1", "--kv-memory", "8MiB"]
    assert main(["bench", "--suites", "smollm2", *asked, *sized, "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/bench.md").read_text()
    assert page in capsys.readouterr().out
    assert "- smollm2, vllm none: vllm is nowhere" in page
    document = json.loads((tmp_path / "out/bench.json").read_text())
    found = {(line["cell"], line["contender"]): line for line in document["lines"]}
    assert set(found) == {
        ("code x1", "outrider none"), ("code x1", "outrider blend"), ("code x1", "transformers lookup"),
        ("k 3", "outrider blend"),
    }  # fmt: skip
    assert all(line["speed"]["count"] == 2 for line in found.values())
    assert all(line["idle"] < 0.2 for line in found.values()), "whoever waits is stopped"
    turns = [json.loads(line) for line in (tmp_path / "out/turns.jsonl").read_text().splitlines()]
    assert len(turns) == 8
    assert set(document["suites"]["smollm2"]["memory"]) == {"outrider none", "outrider blend", "transformers lookup"}


def test_a_run_of_no_minutes_still_has_a_turn(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MODELS", {"smollm2": (str(tiny_llama), None)})
    monkeypatch.setattr(command, "_CONTEXT", 512)
    asked = [
        "--suites",
        "smollm2",
        "--contenders",
        "outrider none",
        "--tokens",
        "4",
        "--minutes",
        "0",
        "--parts",
        "speed",
    ]
    assert main(["bench", *asked, "--threads", "1", "--kv-memory", "8MiB", "--out", str(tmp_path)]) == 0
    (line,) = json.loads((tmp_path / "bench.json").read_text())["lines"]
    assert (line["cell"], line["speed"]["count"]) == ("code x1", 1)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--contenders", "vllm nun"], "vllm nun: there are outrider none, outrider blend"),
        (["--cells", "code x2"], "code x2: there are code x1"),
        (["--peer-python", "sglang=/bin/sh"], "a name among vllm, transformers, llama.cpp"),
        (["--peer-python", "vllm=/no/such/python"], "there is no file /no/such/python"),
        (["--kv-memory", "much"], "--kv-memory much: 'much' is no amount of memory"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_loaded(
    option: list[str], said: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "MODELS", {"smollm2": (str(tiny_llama), None)})
    assert main(["bench", "--suites", "smollm2", "--parts", "speed", *option, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_interpreters_are_looked_for_where_the_documentation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(find, "_ROOT", tmp_path)
    monkeypatch.setattr(find, "MODULES", {"vllm": "json", "transformers": "no_such_module_at_all", "llama.cpp": "json"})
    own = tmp_path / ".venv-vllm/bin/python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert find.interpreter("vllm", {}) == own
    assert find.interpreter("llama.cpp", {}) == PYTHON, "this interpreter has it"
    named = find.interpreter("transformers", {"transformers": PYTHON})
    assert isinstance(named, find.Missing)
    assert "cannot find no_such_module_at_all" in named.why
    nowhere = find.interpreter("transformers", {})
    assert isinstance(nowhere, find.Missing)
    assert ".venv-transformers/bin/python" in nowhere.why


def test_pairs_of_an_option_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "python"
    file.touch()
    assert find.given([f"vllm={file}"], "--peer-python", PEERS) == {"vllm": file}
    with pytest.raises(ConfigError, match="must be NAME=PATH"):
        find.given(["vllm"], "--peer-python", PEERS)
