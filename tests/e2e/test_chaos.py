"""Processes of a served engine are killed and frozen at random under streams: no answer is lost, nothing is left.

Two engines, each of tensor parallel 2 with a drafter that looks ahead. `CHAOS_REQUESTS` (200) answers are asked for,
or more, until `CHAOS_BLOWS` (16) blows have fallen on random processes: every `CHAOS_EVERY_S` (15) seconds, or later
when the last one is not mended by then, so that every one has times of its own: how long the streams it met stood
still, and how long until everything stood again. `CHAOS_OUT` names a file for the same as JSON; beside it a `.log` says
what is about to be done, so that it is known even where nothing comes after it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import ray
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table

from actors.launch import VERIFIER_PREFIX
from cluster.build import assemble
from cluster.config import EngineConfig
from cluster.request import Request, Sampling
from cluster.text.tokenizer import Tokenizer
from deploy.client import Client
from deploy.local import LocalServing, ServeFile
from deploy.reaper import Process, descendants
from tests.e2e.conftest import alive, pids_of, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.soak,
    pytest.mark.timeout(3500),
    # Not ours to mend: Ray leaves pipes and log files for the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "200"))
EVERY_S = float(os.environ.get("CHAOS_EVERY_S", "15"))
BLOWS = int(os.environ.get("CHAOS_BLOWS", "16"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
ENGINES, CLIENTS, TOKENS = 2, 6, 300
PROMPT = "the sea and the sea and"
VICTIMS = {
    "drafter": "ray::Drafter",
    "shard": "ray::Shard",
    "verifier": "VerifierProcess",
    "replica": "ray::ServeReplica:outrider:Engine",
}
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
#: Longest until everything stands again after the last blow, in seconds.
MENDED_S = 300.0
#: How often the processes and what they hold are noted, in seconds.
NOTE_S = 2.0


@dataclass
class Blow:
    """What was done to whom, and what came of it, in seconds; at: on the monotonic clock."""

    victim: str
    how: str
    at: float
    process: Process
    met: int = 0
    still_s: float = 0.0
    whole_s: float | None = None


@dataclass
class Traces:
    """What the run's processes hold that could outlive them."""

    family: set[Process] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)

    def note(self) -> None:
        now = set(descendants(os.getpid()))
        self.family |= now
        pids = {pid for pid, _ in now}
        self.ports |= {port for port, pid in listening() if pid in pids}
        for pid in pids:
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                self.shared |= {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line}

    def left(self) -> dict[str, Any]:
        """What is still there of it."""
        return {
            "processes": alive(sorted(self.family)),
            "ports": sorted(self.ports & {port for port, _ in listening()}),
            "shared memory": sorted(path for path in self.shared if Path(path).exists()),
        }


def listening() -> list[tuple[int, int | None]]:
    """Ports that are listened at, and by which process."""
    return [(each.laddr.port, each.pid) for each in psutil.net_connections("tcp") if each.status == "LISTEN"]


class Streams:
    """The clients: answers by seed, and when each stream said something."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.said: dict[int, str] = {}
        self.wrong: list[str] = []
        self.failovers = 0
        self.times: dict[int, list[float]] = {}

    def run(self, numbers: Iterator[int], more: Callable[[int], bool]) -> None:
        """One client: an answer for each number, while there are to be more."""
        with Client(self._url, silence_s=400.0) as client:
            for number in numbers:
                if not more(number):
                    return
                self._one(client, number)

    def _one(self, client: Client, number: int) -> None:
        times = self.times[number] = [time.monotonic()]
        seed = number % REQUESTS
        told, usage = "", None
        for chunk in client.complete(
            PROMPT, stream=True, seed=seed, temperature=1.0, max_tokens=TOKENS, ignore_eos=True
        ):
            times.append(time.monotonic())
            told += chunk.text
            usage = chunk.usage or usage
        assert usage is not None
        assert usage.completion_tokens == TOKENS
        self.failovers += usage.failovers
        if self.said.setdefault(seed, told) != told:
            self.wrong.append(told)

    def stood_still(self, at: float) -> list[float]:
        """Of each stream under way at a moment: how long until it said something."""
        waits = []
        for times in list(self.times.values()):
            if times[0] <= at < times[-1]:
                waits.append(min(each for each in list(times) if each > at) - at)
        return waits


def verifiers() -> Iterator[Any]:
    for entry in list_named_actors(all_namespaces=True):
        if entry["name"].startswith(VERIFIER_PREFIX):
            yield ray.get_actor(entry["name"], namespace=entry["namespace"])


def whole() -> bool:
    """Whether every engine answers and has its drafter."""
    from ray import serve

    with suppress(ValueError, ray.exceptions.RayError):
        asked = [(each.status.remote(), each.pairs.remote()) for each in verifiers()]
        answers = ray.get([answer for both in asked for answer in both], timeout=2.0)
        states = serve.status().applications["outrider"].deployments["Engine"].replica_states
        return len(asked) == ENGINES == states.get("RUNNING") and all(pairs == 1 for pairs in answers[1::2])
    return False


class Chaos:
    """Blows at random, until told to stop; then until all is mended."""

    def __init__(self, traces: Traces) -> None:
        self.blows: list[Blow] = []
        self._random = random.Random(SEED)
        self._struck: set[int] = set()
        self._order: list[tuple[str, str]] = []
        self._traces = traces
        self._over = threading.Event()

    def run(self) -> None:
        following, noted = time.monotonic() + EVERY_S, 0.0
        while not self._over.wait(0.3):
            if time.monotonic() - noted > NOTE_S:
                self._traces.note()
                noted = time.monotonic()
            if self._look() and time.monotonic() >= following and not self.waits:
                following = time.monotonic() + EVERY_S
                self._strike()
        wait_until(self._look, MENDED_S, "all engines and drafters stand again")

    @property
    def waits(self) -> bool:
        """Whether the last blow is not mended yet."""
        return bool(self.blows) and self.blows[-1].whole_s is None

    def stop(self) -> None:
        self._over.set()

    def _look(self) -> bool:
        well = whole()
        for blow in self.blows if well else ():
            if blow.whole_s is None and not alive([blow.process]):  # a frozen one stands until it is noticed
                blow.whole_s = time.monotonic() - blow.at
                self._log(f"all stand again after {blow.whole_s:.1f} s")
        return well

    def _log(self, line: str) -> None:
        if "CHAOS_OUT" in os.environ:
            with Path(os.environ["CHAOS_OUT"]).with_suffix(".log").open("a") as log:
                log.write(f"{time.strftime('%H:%M:%S')}  {line}\n")

    def _strike(self) -> None:
        if not self._order:  # every kind of blow once before any comes again
            self._order = [(victim, how) for victim in VICTIMS for how in SIGNALS]
            self._random.shuffle(self._order)
        victim, how = self._order.pop()
        there = [pid for pid in pids_of(VICTIMS[victim], os.getpid()) if pid not in self._struck]
        if not there:
            self._order.insert(0, (victim, how))
            return
        pid = self._random.choice(there)
        self._struck.add(pid)
        [process] = [each for each in descendants(os.getpid()) if each[0] == pid]
        self._log(f"blow {len(self.blows) + 1}: {victim} {how}, process {pid}")
        self._traces.note()
        self.blows.append(Blow(victim, how, time.monotonic(), process))
        with suppress(ProcessLookupError):
            os.kill(pid, SIGNALS[how])


def alone(config: EngineConfig) -> dict[int, str]:
    """What an engine in one process, which nothing disturbs, says."""
    target = config.target.model_copy(update={"tensor_parallel": 1})
    engine = assemble(config.model_copy(update={"target": target, "drafts": ()})).engine
    prompt = tuple(Tokenizer.load(Path(config.target.model)).encode(PROMPT))
    texts = dict.fromkeys(range(REQUESTS), "")
    for first in range(0, REQUESTS, 16):
        for seed in range(first, min(first + 16, REQUESTS)):
            sampling = Sampling(temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True)
            engine.submit(Request(str(seed), prompt, sampling))
        while engine.has_work:
            for delta in engine.step():
                texts[int(delta.request)] += delta.text
    return texts


def table(blows: list[Blow]) -> str:
    """Recovery by victim and blow."""
    lines = ["victim    blow    times  streams met  stood still s (median, longest)  all whole s (median, longest)"]
    for victim in VICTIMS:
        for how in SIGNALS:
            these = [blow for blow in blows if (blow.victim, blow.how) == (victim, how)]
            if these:
                still, mended = [blow.still_s for blow in these], [blow.whole_s or 0.0 for blow in these]
                lines.append(
                    f"{victim:9} {how:7} {len(these):5}  {sum(blow.met for blow in these):11}"
                    f"  {median(still):15.1f} {max(still):15.1f}  {median(mended):13.1f} {max(mended):14.1f}"
                )
    return "\n".join(lines)


@pytest.fixture
def file(tiny_config: Callable[..., Path]) -> ServeFile:
    draft = {
        "kind": "model",
        "layers": {"first": 2},
        "drafter": {"place": "dedicated", "cpus": 0.1, "mode": "lookahead", "wait_ms": 20},
    }
    path = tiny_config(
        drafts=[draft],
        placement={"cpus": 0.2, "wait_s": 120},
        serving={"name": "tiny", "max_tokens": TOKENS, "failovers": 50, "failover_s": 300},
    )
    file = ServeFile.read(path)
    target = file.config.target.model_copy(update={"tensor_parallel": 2})
    engine = {**file.deployments["Engine"], "num_replicas": ENGINES}
    return replace(file, config=file.config.model_copy(update={"target": target}), deployments={"Engine": engine})


@pytest.fixture
def own_environment(tmp_path: Path) -> Iterator[Path]:
    """Processes started meanwhile find our packages, and make their temporary files in the directory given."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    os.environ["TMPDIR"] = str(tmp_path)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)
    for _ in range(3):  # here, where the marks above hold, and not at the end of the session
        gc.collect()


def require_nothing_owned() -> None:
    """Every engine idle and every block back; then everything gone with the application."""
    from ray import serve

    for status in ray.get([each.status.remote() for each in verifiers()], timeout=30.0):
        assert (status.running, status.waiting, status.blocks_owned) == (0, 0, 0)
        assert status.blocks_free + status.blocks_cached == status.blocks_total
    serve.shutdown()
    wait_until(lambda: not list_named_actors(all_namespaces=True), 30.0, "no actor is left")
    wait_until(
        lambda: {entry["state"] for entry in placement_group_table().values()} <= {"REMOVED"}, 30.0, "no group is left"
    )
    wait_until(
        lambda: not any(pids_of(title, os.getpid()) for title in VICTIMS.values()), 30.0, "no process of ours is left"
    )


def test_no_answer_is_lost_and_nothing_is_left(
    file: ServeFile, own_environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = alone(file.config)
    traces = Traces()
    with LocalServing(file, lambda _: None, ready_s=300.0):
        wait_until(whole, 120.0, "all engines and drafters stand")
        streams, chaos = Streams(file.url), Chaos(traces)

        def more(number: int) -> bool:
            return not disturbing.done() and (number < REQUESTS or len(chaos.blows) < BLOWS)

        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            disturbing = pool.submit(chaos.run)
            try:
                numbers = count()
                for client in [pool.submit(streams.run, numbers, more) for _ in range(CLIENTS)]:
                    client.result(3000.0)
            finally:
                chaos.stop()
            disturbing.result(MENDED_S + 60.0)
        for blow in chaos.blows:
            waits = streams.stood_still(blow.at)
            blow.met, blow.still_s = len(waits), max(waits, default=0.0)
        with capsys.disabled():
            sys.stdout.write(
                f"\n{len(streams.times)} answers, {streams.failovers} taken up elsewhere\n{table(chaos.blows)}\n"
            )
        if "CHAOS_OUT" in os.environ:
            Path(os.environ["CHAOS_OUT"]).write_text(json.dumps([asdict(blow) for blow in chaos.blows], indent=1))
        assert chaos.blows
        assert streams.said == expected
        assert not streams.wrong
        require_nothing_owned()
    wait_until(lambda: not any(traces.left().values()), 30.0, f"nothing is left: {traces.left()}")
    assert list(own_environment.iterdir()) == []
