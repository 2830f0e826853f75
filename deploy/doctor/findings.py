"""What the figures say, in words: pure functions from measurements to advice.

Knows: thresholds, and which line of ray_config.yaml they bear on.
Refuses to know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.control.latency import ahead, best_k, expected_tokens, serial
from cluster.control.steptime import StepTable
from deploy.doctor.trials import Sameness, Trial

#: A step this many times its floor is slower than the kernels are: something else holds it up.
_SLOW_STEP = 2.5
#: A ratio below this is a loss that noise does not explain.
_LOSS = 0.97
#: Share of outcomes a drafter on its own device is taken to have ready (algorithm of arXiv 2603.03251).
_READY = 0.8
#: What another draft length must bring to be worth a change.
_GAIN = 1.05


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything measured. floor_s: what reading the weights once takes. draft_step_s: by method, of models."""

    table: StepTable
    floor_s: float
    sameness: tuple[Sameness, ...]
    trials: tuple[Trial, ...]
    draft_step_s: dict[str, float]
    kernels: bool
    k: int


def advice(figures: Figures) -> list[str]:
    """What to change, most important first; one line that says so where there is nothing."""
    lines = [*_wrong(figures), *_slow(figures), *_drafts(figures)]
    return lines or ["nothing to change"]


def own_device(figures: Figures, trial: Trial) -> tuple[float, float] | None:
    """Expected speed-ups of a draft model at batch 1: taking turns with the target, and on a device of its own.

    None where the draft is no model or nothing is known of its acceptance.
    """
    step_s = figures.draft_step_s.get(trial.method)
    if step_s is None or not trial.alphas:
        return None
    cost = step_s / figures.table.at(1)

    def turns(k: int) -> float:
        return serial(trial.alphas, k, cost, figures.table.at(k + 1) / figures.table.at(1)) if k else 1.0

    def apart(k: int) -> float:
        if not k:
            return 1.0
        verify = figures.table.at(k + 1) / figures.table.at(1)
        return ahead(_READY, expected_tokens(trial.alphas, k), 1.0, (k + 1) * cost / verify, 0.0) / verify

    return turns(best_k(turns, 15)), apart(best_k(apart, 15))


def best(trials: Sequence[Trial], batch: int) -> Trial | None:
    """The fastest way of drafting at a batch."""
    return max((trial for trial in trials if trial.batch == batch), key=lambda trial: trial.ratio, default=None)


def _wrong(figures: Figures) -> list[str]:
    return [
        f"answers {found.way} differ from those alone in {found.of - found.same} of {found.of}: near-ties of this "
        "dtype, or a fault; run with target.dtype: float32, and report it if they differ there"
        for found in figures.sameness
        if found.same < found.of
    ]


def _slow(figures: Figures) -> list[str]:
    if not figures.kernels:
        return ["no compiled kernels: install a C++ compiler (g++), steps get several times faster"]
    times = figures.table.at(1) / figures.floor_s
    if times > _SLOW_STEP:
        return [
            f"a step takes {times:.1f} times what reading the weights takes: look for other load, and set "
            "target.threads to the cores this process really has"
        ]
    return []


def _drafts(figures: Figures) -> list[str]:
    lines = []
    alone = best(figures.trials, 1)
    if alone is None:
        return ["drafts is empty: add `- kind: ngram`, which costs next to nothing"]
    for method in dict.fromkeys(trial.method for trial in figures.trials):
        own = [trial for trial in figures.trials if trial.method == method]
        if all(trial.ratio < _LOSS for trial in own):
            lines.append(f"drafts: {method} never paid here ({own[0].ratio:.2f} at batch {own[0].batch}): remove it")
    nearest = min(
        (trial for trial in figures.trials if (trial.batch, trial.method) == (1, alone.method)),
        key=lambda trial: abs(trial.k - figures.k),
    )
    if alone.ratio > max(1.0, _GAIN * nearest.ratio):
        lines.append(f"user_config: k: {alone.k} was the best length at batch 1 ({alone.method}, {alone.ratio:.2f})")
    return lines
