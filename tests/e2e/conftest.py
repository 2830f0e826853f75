"""Real processes for the end-to-end tests: one Ray with a tiny model a module, commands as a person starts them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.local import free_port
from deploy.reaper import Process, descendants

ROOT = Path(__file__).resolve().parents[2]

#: Processes started here: no token of this user's, our packages, no look-ups on a hub.
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "disabled",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}


def wait_until(holds: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """The first true answer of `holds`; fails the test at the deadline."""
    limit = time.monotonic() + deadline_s
    while not (answer := holds()):
        assert time.monotonic() < limit, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.1)
    return answer


def healthy(url: str) -> dict[str, Any] | None:
    """The body of /health; None while there is no good one."""
    with contextlib.suppress(httpx.TransportError):
        response = httpx.get(f"{url}/health", timeout=10.0)
        return response.json() if response.status_code == 200 else None
    return None


def pids_of(title: str, below: int) -> list[int]:
    """The processes below `below` that Ray has given this title."""
    found = []
    for pid, _ in descendants(below):
        with contextlib.suppress(OSError):
            if title in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def pid_of(title: str, below: int) -> int | None:
    """The first of them."""
    return next(iter(pids_of(title, below)), None)


def alive(processes: list[Process]) -> list[int]:
    """Which of these are still running."""
    now = set()
    for pid, start in processes:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[19]) == start:
                now.add(pid)
    return sorted(now)


@dataclass
class Command:
    """A process started by a test, with everything it prints."""

    process: subprocess.Popen[bytes]
    log: Path
    family: set[Process] = field(default_factory=set)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def note_family(self) -> set[Process]:
        self.family |= set(descendants(self.process.pid))
        return self.family

    def wait_for(self, text: str, deadline_s: float) -> None:
        def there() -> bool:
            self.note_family()
            assert text in self.said or self.process.poll() is None, f"ended before {text!r}:\n{self.said}"
            return text in self.said

        wait_until(there, deadline_s, f"{text!r} in:\n{self.said[-2000:]}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start a command; whatever is left of it and its descendants afterwards is killed."""
    started: list[Command] = []

    def run(*words: str, env: dict[str, str] | None = None) -> Command:
        log = tmp_path / f"command-{len(started)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                words, cwd=tmp_path, env=ENVIRONMENT | (env or {}), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        started.append(Command(process, log))
        return started[-1]

    yield run
    for command in started:
        command.note_family()
        for pid in [*alive(sorted(command.family)), command.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        command.process.wait(10)


@pytest.fixture
def head(start: Callable[..., Command]) -> Iterator[str]:
    """A running `ray start --head` of our own; its dashboard's address."""
    scratch = tempfile.mkdtemp(prefix="or")  # short: paths of its sockets must fit into 107 characters
    dashboard = free_port()
    ray = start(
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2",
        f"--port={free_port()}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}",
        f"--ray-client-server-port={free_port()}", f"--temp-dir={scratch}", "--object-store-memory=100000000",
        env={"RAY_worker_niceness": "0"},
    )  # fmt: skip
    ray.wait_for("Ray runtime started", 60.0)
    yield f"http://127.0.0.1:{dashboard}"
    family = sorted(ray.note_family())
    for pid in [ray.process.pid, *alive(family)]:  # asked to end, it takes half a minute
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)


def deploy(path: Path, head: str) -> None:
    command = (sys.executable, "-m", "ray.serve.scripts", "deploy", str(path), "-a", head)
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def tiny_config(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a Serve config file for the tiny model on a free port."""

    def write(**changes: Any) -> Path:
        args = {
            "target": {"model": str(tiny_llama), "dtype": "float32", "threads": 1},
            "cache": {"blocks": 256},
            "serving": {"name": "tiny", "max_tokens": 32},
            **changes,
        }
        document = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": free_port()},
            "applications": [
                {
                    "name": "outrider",
                    "route_prefix": "/",
                    "import_path": "deploy.app:build",
                    "args": args,
                    "deployments": [{"name": "Engine", "user_config": {"k": 4}}],
                }
            ],
        }
        path = tmp_path_factory.mktemp("config") / "ray_config.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


def outrider(*words: str) -> tuple[str, ...]:
    """The command line of `outrider`, as installed or not."""
    return (sys.executable, "-m", "deploy.cli", *words)
