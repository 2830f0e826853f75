"""The command `outrider simulate`: what would this pair do on these devices?

Knows: what its arguments mean, and the order in which batches and modes are measured.
Refuses to know: how a cell is measured, predicted or shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from cluster.errors import ConfigError
from cluster.model.emulated import Acceptance, StepTimes
from deploy.simulation.measure import Measurement, measure
from deploy.simulation.pair import read_acceptance
from deploy.simulation.playback import Played, play
from deploy.simulation.predict import predict
from deploy.simulation.report import Cell, Report
from deploy.simulation.scenario import MODES, PROMPT, Mode, Scenario
from deploy.simulation.stage import staged

_MOST_BATCH = 64


def run(arguments: argparse.Namespace) -> int:
    """Measure every batch in every mode, one after the other, in real time."""
    scenario = _scenario(arguments)
    lengths = _numbers("--k", arguments.k, 1, 64)
    batches = _numbers("--batches", arguments.batches, 1, _MOST_BATCH)
    modes = list(MODES) if arguments.modes is None else _modes(arguments.modes)
    report = Report(_measure(scenario, batches, modes, lengths))
    for line in report.lines():
        print(line)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.document(), indent=1) + "\n", encoding="utf-8")
    return 0


def _measure(scenario: Scenario, batches: Sequence[int], modes: Sequence[Mode], lengths: Sequence[int]) -> list[Cell]:
    cells = []
    for batch in batches:
        for mode in modes:
            for k in lengths if mode != "none" else lengths[:1]:
                print(f"batch {batch}, {mode}, k {k}", end="\r", file=sys.stderr, flush=True)
                cells.append(_cell(replace(scenario, k=k), mode, batch))
    return cells


def _cell(scenario: Scenario, mode: Mode, batch: int) -> Cell:
    with staged(scenario, mode, batch) as running:
        measured = Measurement.of(measure(running, batch, scenario.seconds))
        end = PROMPT + round(measured.tokens * measured.rounds)
        played = play(running.ranks_LP[:, PROMPT:end], scenario.k) if mode != "none" else Played(1.0, 0.0)
    return Cell(scenario, mode, batch, measured, predict(scenario, mode, batch), played)


def _scenario(arguments: argparse.Namespace) -> Scenario:
    acceptance = (
        Acceptance((arguments.alpha,))
        if arguments.acceptance is None
        else read_acceptance(arguments.acceptance, arguments.workload)
    )
    return Scenario(
        target=StepTimes.parse(arguments.target, arguments.launch),
        draft=StepTimes.parse(arguments.draft, arguments.launch),
        acceptance=acceptance,
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
