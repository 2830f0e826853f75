"""The command `outrider doctor`: is this machine, with this configuration, right and fast?

Knows: the order of the examination, and how its figures are shown.
Refuses to know: how they are measured (machine.py, trials.py) and what they mean (findings.py).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from cluster.build import TARGET, Assembly, assemble
from cluster.config import Config
from cluster.control.steptime import StepTable, measure
from cluster.kernels.library import open_library
from cluster.model.device import resolve_device
from cluster.model.files import read_header, weight_files
from cluster.model.load import locate
from cluster.model.runner import Runner
from deploy.doctor.findings import Figures, advice, best, own_device
from deploy.doctor.machine import Machine, examine
from deploy.doctor.trials import LENGTHS, Trial, Trials
from deploy.local import ServeFile

Report = Callable[[str], None]

_ROWS = (1, 2, 4, 8, 16, 32, 64)
#: For timing the steps of one model, in seconds.
_PATIENCE_S = 20.0


def run(arguments: argparse.Namespace, file: ServeFile, progress: Report) -> int:
    """Examine, and print a report. 0 when nothing is wrong, 1 where answers differed that must not."""
    began = time.monotonic()
    machine = examine(resolve_device(file.config.target.device))
    _show("machine", [f"{name:<14}{fact}" for name, fact in machine.facts])
    # Every length that is tried must be allowed; what is configured is compared with the best of them.
    knobs = file.knobs.model_copy(update={"k": max(LENGTHS)})
    made = assemble(file.config.model_copy(update={"knobs": knobs}), progress)
    _show("model", made.resolved.lines())
    figures = _figures(arguments, file, made, machine, progress)
    _show("a step of the target, by its tokens", _steps(figures))
    _show("same tokens as alone and without drafts", [f"{s.way:<18}{s.same} of {s.of}" for s in figures.sameness])
    _show("drafts: tokens a second with over without", _trials(figures))
    _show("advice", advice(figures))
    print(f"\n{time.monotonic() - began:.0f} s")
    if arguments.json is not None:
        document = {"machine": dict(machine.facts), "figures": asdict(figures), "advice": advice(figures)}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(found.same == found.of for found in figures.sameness) else 1


def _figures(
    arguments: argparse.Namespace, file: ServeFile, made: Assembly, machine: Machine, progress: Report
) -> Figures:
    config = file.config
    progress("timing steps")  # before anything is cached, as it overwrites blocks
    tables = {name: _table(made, runner, config.cache.block_tokens) for name, runner in made.runners.items()}
    methods = tuple(dict.fromkeys(made.resolved.drafts))
    trials = Trials(made, arguments.tokens, config.scheduler.max_sequences)
    progress("comparing answers")
    sameness = [
        found
        for temperature in (0.0, 1.0)
        for found in trials.sameness(methods, temperature)
    ]  # fmt: skip
    measured: list[Trial] = []
    for method in methods:
        for batch in trials.batches:
            progress(f"timing drafts: {method}, batch {batch}")
            measured.extend(trials.trial(method, batch, k, arguments.repeats) for k in LENGTHS)
    return Figures(
        table=tables[TARGET],
        floor_s=step_bytes(config, made) / machine.bandwidth,
        sameness=tuple(sameness),
        trials=tuple(measured),
        draft_step_s={name: table.at(1) for name, table in tables.items() if name != TARGET},
        kernels=made.resolved.model.device != "cpu" or open_library() is not None,
        k=file.knobs.k,
    )


def _table(made: Assembly, runner: Runner, block_tokens: int) -> StepTable:
    return measure(runner, blocks=made.resolved.blocks, block_tokens=block_tokens, patience_s=_PATIENCE_S)


def step_bytes(config: Config, made: Assembly) -> float:
    """Bytes of weights that one step reads: all but an embedding of its own, of which a few rows are."""
    tensors = [
        tensor
        for path in weight_files(locate(config.target.model).directory)
        for tensor in read_header(path)
    ]  # fmt: skip
    tied = not any("lm_head" in tensor.name for tensor in tensors)
    read = sum(tensor.numel for tensor in tensors if tied or "embed_tokens" not in tensor.name)
    bits = config.target.bits
    size = getattr(torch, made.resolved.model.dtype).itemsize if bits is None else bits / 8 + 1 / 8
    return float(read * size)


def _show(title: str, lines: list[str]) -> None:
    print(f"\n{title}")
    for line in lines:
        print(f"  {line}")


def _steps(figures: Figures) -> list[str]:
    first = figures.table.at(1)
    return [f"floor    {figures.floor_s * 1e3:7.2f} ms, reading the weights once"] + [
        f"{rows:3d}      {figures.table.at(rows) * 1e3:7.2f} ms, {figures.table.at(rows) / figures.floor_s:5.2f} x the "
        f"floor, {figures.table.at(rows) / first:5.2f} x one token's"
        for rows in _ROWS
    ]


def _trials(figures: Figures) -> list[str]:
    lines = []
    for trial in figures.trials:
        alphas = " ".join(f"{alpha:.2f}" for alpha in trial.alphas[:5])
        lines.append(
            f"{trial.method:<12}batch {trial.batch}  k {trial.k:2d}  {trial.ratio:5.2f} x  tau {trial.tau:4.2f}  "
            f"acceptance {alphas or 'unknown'}"
        )
    for batch in dict.fromkeys(trial.batch for trial in figures.trials):
        found = best(figures.trials, batch)
        if found is not None:
            lines.append(f"best at batch {batch}: {found.method}, k {found.k}, {found.ratio:.2f} x")
    for trial in figures.trials:
        speed_ups = own_device(figures, trial)
        if speed_ups is not None and trial.batch == 1:
            turns, apart = speed_ups
            lines.append(f"{trial.method}: {turns:.2f} x taking turns, {apart:.2f} x on a device of its own (expected)")
    return lines
