"""Emulated drafters are processes behind real channels: they draft as one in this process would, and they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster.model.emulated import Acceptance, StepTimes
from deploy.simulation.measure import Measurement, measure
from deploy.simulation.scenario import Mode, Scenario
from deploy.simulation.stage import staged

SCENARIO = Scenario(StepTimes.parse("1:2"), StepTimes.parse("0.3"), Acceptance((0.8,)), k=4, seconds=0.4)
ROOT = Path(__file__).resolve().parents[3]


def children() -> set[int]:
    """Processes of this one that draft."""
    return {p.pid for p in psutil.Process().children(recursive=True)}


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("mode", ["sync", "lookahead", "pearl"])
def test_a_killed_drafter_costs_its_speed_up_and_nothing_else(mode: Mode) -> None:
    with staged(SCENARIO, mode, 2) as running:
        course = measure(running, 2, SCENARIO.seconds, kill_at=0.2)  # compares every token with the target's text
    before = Measurement.of([r for r in course.rounds if r.at_s < 0.2])
    after = Measurement.of(course.rounds[-20:])
    assert before.hit > 0.1
    assert before.tokens > 1.1
    assert (after.hit, after.tokens) == (0.0, 1.0)
    assert running.gauge.names == ("model",)


def test_two_drafters_share_the_sequences() -> None:
    with staged(replace(SCENARIO, drafters=2), "sync", 4) as running:
        during = children()
        told = Measurement.of(measure(running, 4, 0.2).rounds)
    assert told.hit == 1.0
    assert len(during - children()) == 2


def test_no_drafter_outlives_a_killed_parent() -> None:
    script = (
        "import time\n"
        "from tests.deploy.simulation.test_drafters import SCENARIO\n"
        "from deploy.simulation.stage import staged\n"
        "if __name__ == '__main__':\n"
        "    with staged(SCENARIO, 'sync', 1):\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
    )
    with subprocess.Popen((sys.executable, "-c", script), stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        below = psutil.Process(parent.pid).children(recursive=True)
        assert len(below) >= 2
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, below))
