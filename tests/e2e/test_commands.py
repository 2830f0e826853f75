"""The commands as a person runs them, and what they leave behind: nothing."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from deploy.local import ServeFile, free_port
from tests.e2e.conftest import ENVIRONMENT, ROOT, Command, alive, deploy, healthy, outrider, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]

READY_S = 90.0


def run(*words: str, code: int, stdin: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        outrider(*words), capture_output=True, text=True, env=ENVIRONMENT, input=stdin, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


# -- doctor ----------------------------------------------------------------------------------


def test_the_doctor_examines_a_configuration_and_reports(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "ray_config.yaml"
    document = yaml.safe_load((ROOT / "ray_config.yaml").read_text(encoding="utf-8"))
    drafts = [{"kind": "ngram"}, {"kind": "model", "layers": {"first": 1}}]
    document["applications"][0]["args"] = {
        "target": {"model": str(tiny_llama), "dtype": "float32"}, "drafts": drafts, "cache": {"memory": "64MiB"},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    figures = tmp_path / "figures.json"
    done = run("doctor", "--config", str(file), "--tokens", "6", "--repeats", "1", "--json", str(figures), code=0)
    for title in ("machine", "a step of the target", "same tokens", "drafts", "advice"):
        assert title in done.stdout
    told = json.loads(figures.read_text(encoding="utf-8"))
    assert [found["same"] for found in told["figures"]["sameness"]] == [8] * 6
    assert set(told["figures"]["draft_step_s"]) == {"model"}
    assert {(trial["method"], trial["batch"]) for trial in told["figures"]["trials"]} == {
        (method, batch) for method in ("ngram", "model") for batch in (1, 8)
    }


# -- generate --------------------------------------------------------------------------------


def test_generate_answers_without_ray_and_the_same_without_speculation(tiny_llama: Path) -> None:
    script = (
        "import sys\nfrom deploy.cli import main\ncode = main(sys.argv[1:])\n"
        "code |= main([*sys.argv[1:], '--no-speculation'])\n"
        "print(sorted({'ray', 'fastapi', 'starlette'} & set(sys.modules)), file=sys.stderr)\nsys.exit(code)\n"
    )
    words = ("generate", "the sea", "--model", str(tiny_llama), "--max-tokens", "12", "--dtype", "float32", "--stats",
             "--temperature", "0.8", "--seed", "4", "--raw")  # fmt: skip
    done = subprocess.run(
        (sys.executable, "-c", script, *words), capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=True
    )
    half = len(done.stdout) // 2
    assert done.stdout.strip()
    assert done.stdout[:half] == done.stdout[half:]
    assert done.stderr.splitlines()[-1] == "[]"
    assert "tokens per step" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("generate", "x", "--model", "smollm"), "did you mean 'smollm2-135m'"),
        (("generate", "x", "--temperature", "-1"), "temperature"),
        (("generate", "x", "--max-tokens", "0"), "max_tokens"),
        (("serve", "--config", "/nowhere.yaml"), "no such file"),
        (("config", "--config", "/nowhere.yaml"), "no such file"),
    ],
)
def test_mistakes_are_told_in_one_line(words: tuple[str, ...], told: str) -> None:
    done = run(*words, code=2)
    [line] = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith("outrider: error: ")
    assert told in line


# -- serve -----------------------------------------------------------------------------------


def test_a_port_in_use_is_told_before_anything_starts(tiny_config: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("serve", "--config", str(tiny_config()), "--port", port, code=2)
    assert f"port {port}" in done.stderr
    assert "starting Ray" not in done.stderr


def test_a_model_that_is_not_there_ends_serve_with_its_reason(
    tiny_config: Callable[..., Path], start: Callable[..., Command]
) -> None:
    serve = start(*outrider("serve", "--config", str(tiny_config(target={"model": "/nowhere/at/all"}))))
    assert serve.process.wait(READY_S) == 2
    assert "outrider: error: '/nowhere/at/all' is neither a directory" in serve.said
    assert "Traceback" not in serve.said


def test_sigterm_ends_serve_and_all_it_started(tiny_config: Callable[..., Path], start: Callable[..., Command]) -> None:
    path = tiny_config()
    serve = start(*outrider("serve", "--config", str(path), "--no-speculation"))
    serve.wait_for("ready at", READY_S)
    url = ServeFile.read(path).url
    body = {"prompt": "the the the the the", "max_tokens": 8}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()["usage"]["outrider"]["drafted"] == 0
    family = sorted(serve.note_family())
    assert len(family) > 5
    serve.process.send_signal(signal.SIGTERM)
    assert serve.process.wait(40) == 130
    assert "Traceback" not in serve.said
    wait_until(lambda: not alive(family), 5.0, f"all of {family} have ended")


def test_killing_serve_leaves_no_process(tiny_config: Callable[..., Path], start: Callable[..., Command]) -> None:
    serve = start(*outrider("serve", "--config", str(tiny_config())))
    serve.wait_for("ready at", READY_S)
    time.sleep(3.0)  # one look of the watch
    family = sorted(serve.note_family())
    serve.process.kill()
    serve.process.wait(10)
    wait_until(lambda: not alive(family), 10.0, f"all of {family} have ended")


# -- serve deploy ----------------------------------------------------------------------------


def test_the_file_deploys_and_its_knobs_change_without_a_restart(head: str, tmp_path: Path) -> None:
    document: Any = yaml.safe_load((ROOT / "ray_config.yaml").read_text())
    document["http_options"]["port"] = free_port()
    path, url = tmp_path / "ray_config.yaml", f"http://127.0.0.1:{document['http_options']['port']}"
    path.write_text(yaml.safe_dump(document))
    deploy(path, head)
    wait_until(lambda: healthy(url), READY_S, "the deployed application answers")
    # Its last words have occurred before: a look-up drafts at the first step, whatever the model says.
    asked: Any = {"model": "smollm2-135m", "prompt": "red green blue red green blue red green", "temperature": 0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:

        def drafted() -> int:
            usage = client.completions.create(**asked, max_tokens=24).usage
            assert usage is not None
            return int(usage.model_dump()["outrider"]["drafted"])

        assert drafted() > 0
        whole = client.completions.create(**asked, max_tokens=24).choices[0].text
        stream = client.completions.create(**asked, max_tokens=24, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole
        before = healthy(url)
        [engine] = [entry for entry in document["applications"][0]["deployments"] if entry["name"] == "Engine"]
        engine["user_config"]["k"] = 0
        path.write_text(yaml.safe_dump(document))
        deploy(path, head)
        wait_until(lambda: drafted() == 0, 20.0, "k = 0 is in force")
        after = healthy(url)
    assert before is not None
    assert after is not None
    assert after["engine"]["steps"] > before["engine"]["steps"], "the engine was restarted"
