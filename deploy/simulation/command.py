"""The command `outrider simulate`: what would this pair do on these devices?

Knows: what its arguments mean, and the order in which batches and modes are measured.
Refuses to know: how a cell is measured, predicted or shown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from cluster.errors import ConfigError
from cluster.model.emulated import Acceptance, StepTimes
from deploy.simulation.measure import Measurement, measure
from deploy.simulation.pair import read_acceptance
from deploy.simulation.predict import played, predict
from deploy.simulation.report import Cell, Death, Report
from deploy.simulation.scenario import MODES, Mode, Scenario
from deploy.simulation.stage import staged

_MOST_BATCH = 64


def run(arguments: argparse.Namespace) -> int:
    """Measure every batch in every mode, one after the other, in real time."""
    scenario = _scenario(arguments)
    lengths = _numbers("--k", arguments.k, 1, 64)
    batches = _numbers("--batches", arguments.batches, 1, _MOST_BATCH)
    modes = list(MODES) if arguments.modes is None else _modes(arguments.modes)
    wider = scenario.wider(
        StepTimes.parse(arguments.target_wider, arguments.launch) if arguments.target_wider else None,
        arguments.wider_efficiency,
    )
    if arguments.kill_after is not None and not 0 < arguments.kill_after < arguments.seconds:
        raise ConfigError(f"--kill-after {arguments.kill_after}: write a time within the {arguments.seconds} seconds")
    cells = _measure(scenario, batches, modes, lengths, arguments.kill_after)
    apart = any(scenario.devices(mode) > scenario.target_devices for mode in modes)
    alone: list[Mode] = ["none", "colocated"]
    report = Report(cells, _measure(wider, batches, alone, lengths) if apart else [])
    for line in report.lines():
        print(line)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.document(), indent=1) + "\n", encoding="utf-8")
    return 0


def _measure(
    scenario: Scenario,
    batches: Sequence[int],
    modes: Sequence[Mode],
    lengths: Sequence[int],
    kill_at: float | None = None,
) -> list[Cell]:
    cells = []
    for batch in batches:
        for mode in modes:
            for k in lengths if mode != "none" else lengths[:1]:
                cells.append(_cell(replace(scenario, k=k), mode, batch, kill_at))
    return cells


def _cell(scenario: Scenario, mode: Mode, batch: int, kill_at: float | None) -> Cell:
    with staged(scenario, mode, batch) as running:
        if running.drafters is None:
            kill_at = None
        course = measure(running, batch, scenario.seconds, kill_at)
    rounds = course.rounds
    alive = [r for r in rounds if kill_at is None or r.at_s < kill_at]
    measured = Measurement.of(alive)
    said = [ranks[span] for ranks, span in zip(running.ranks_LP, course.spans, strict=True)]
    death = None if kill_at is None else Death.of(rounds[len(alive) + 1 :])
    return Cell(scenario, mode, batch, measured, predict(scenario, mode, batch), played(scenario, mode, said), death)


def _scenario(arguments: argparse.Namespace) -> Scenario:
    acceptance = (
        Acceptance((arguments.alpha,), arguments.miss_power)
        if arguments.acceptance is None
        else read_acceptance(arguments.acceptance, arguments.workload, arguments.miss_power)
    )
    return Scenario(
        target=StepTimes.parse(arguments.target, arguments.launch),
        draft=StepTimes.parse(arguments.draft, arguments.launch),
        acceptance=acceptance,
        budget=arguments.budget,
        most_rows=arguments.most_rows,
        wait_ms=arguments.wait,
        drafters=arguments.drafters,
        target_devices=arguments.target_devices,
        seconds=arguments.seconds,
        seed=arguments.seed,
    )


def _numbers(name: str, text: str, least: int, most: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(least <= number <= most for number in numbers):
        raise ConfigError(f"{name} {text!r}: write numbers from {least} to {most}, as in {least},{most}")
    return numbers


def _modes(text: str) -> list[Mode]:
    found: list[Mode] = [mode for part in text.split(",") for mode in MODES if mode == part]
    if len(found) != len(text.split(",")):
        raise ConfigError(f"--modes {text!r}: write some of {','.join(MODES)}")
    return found
