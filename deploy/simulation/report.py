"""Measurements beside predictions: a table for people, a document for programs, and what follows.

Knows: how speeds compare and what a difference is made of.
Refuses to know: how either was come by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.simulation.measure import Measurement, Round
from deploy.simulation.playback import Played
from deploy.simulation.predict import Prediction, best_k
from deploy.simulation.scenario import Mode, Scenario

#: Parts of a difference below this share of a round are not worth a word.
_WORTH = 0.01
_HEAD = (
    f"{'batch':>5} {'mode':<10}{'k':>3}{'devices':>8}{'tokens/s':>10}{'predicted':>10}{'':>6}{'x none':>8}{'x sync':>8}"
    f"{'hits':>6}{'tokens':>8}{'round':>8}{'tok/s/dev':>10}   what the difference is made of"
)


@dataclass(frozen=True, slots=True)
class Death:
    """What followed when the drafters were killed: the speed from the next round on, and the longest round."""

    measured: Measurement
    longest_ms: float

    @staticmethod
    def of(rounds: Sequence[Round]) -> Death:
        return Death(Measurement.of(rounds), 1e3 * max(r.step_s for r in rounds))


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch in one mode, measured and predicted."""

    scenario: Scenario
    mode: Mode
    batch: int
    measured: Measurement
    predicted: Prediction
    played: Played  # the same rounds over the measured text, without time
    death: Death | None = None

    @property
    def devices(self) -> int:
        return self.scenario.devices(self.mode)

    @property
    def tokens_s_device(self) -> float:
        return self.measured.tokens_s / self.devices

    def because(self) -> str:
        """What sets the measurement apart from the prediction, largest part of a round's time first.

        Tokens a second are tokens a row over the time of a round: the former as ratios, the latter as milliseconds.
        """
        measured, predicted = self.measured, self.predicted
        parts = {
            "engine": measured.engine_ms,
            "waking": measured.late_ms,
            "verifying": measured.target_ms - predicted.target_ms,
            "drafting": measured.draft_ms - predicted.draft_ms,
        }
        worth = sorted(
            (name for name, ms in parts.items() if abs(ms) > _WORTH * predicted.round_ms),
            key=lambda name: -abs(parts[name]),
        )
        said = [f"{name} {parts[name]:+.1f} ms" for name in worth]
        ratios = {
            "late drafts": measured.tokens / self.played.tokens - 1,
            "luck of the text": self.played.tokens / predicted.tokens - 1,
        }
        for name, ratio in ratios.items():
            if abs(ratio) > _WORTH:
                said.insert(0, f"{name} {ratio:+.0%}")
        return ", ".join(said) or "nothing worth a word"


class Report:
    """All cells of one command; `wider` are those where the target has the draft devices as well."""

    def __init__(self, cells: Sequence[Cell], wider: Sequence[Cell]) -> None:
        self._cells = tuple(cells)
        self._wider = tuple(wider)

    def lines(self) -> list[str]:
        """The table, then the answers."""
        lines = [_HEAD, *(self._line(cell, self._cells) for cell in self._cells)]
        if self._wider:
            lines += ["", "with the draft devices given to the target:"]
            lines += [self._line(cell, self._wider) for cell in self._wider]
        return [*lines, "", *self.answers()]

    def answers(self) -> list[str]:
        """Best draft lengths, and whether a draft device is worth more than a wider target; one a line."""
        lines = []
        for cell in self._cells:
            if cell.mode != "none" and cell.scenario.k == self._cells[-1].scenario.k:
                best = best_k(cell.scenario, cell.mode, cell.batch)
                lines.append(f"batch {cell.batch}, {cell.mode}: best k by prediction {best}")
        return [*lines, *self._planes(), *self._worth(), *self._deaths()]

    def document(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "cells": [self._entry(cell, self._cells) for cell in self._cells],
            "wider": [self._entry(cell, self._wider) for cell in self._wider],
            "answers": self.answers(),
        }

    def _planes(self) -> list[str]:
        return [
            f"batch {cell.batch}, {cell.mode}: half of the rounds with every draft there spent under "
            f"{cell.measured.plane_ms:.1f} ms on handing outcomes over and drafts back"
            for cell in self._cells
            if cell.mode in ("lookahead", "pearl") and cell.measured.plane_ms
        ]

    def _worth(self) -> list[str]:
        lines = []
        for batch in dict.fromkeys(cell.batch for cell in self._wider):
            apart = [c for c in self._cells if c.batch == batch and c.devices == self._wider[0].devices]
            if not apart:
                continue
            ours = max(apart, key=lambda c: c.measured.tokens_s)
            theirs = max((c for c in self._wider if c.batch == batch), key=lambda c: c.measured.tokens_s)
            ratio = ours.measured.tokens_s / theirs.measured.tokens_s
            lines.append(
                f"batch {batch}: {ours.devices} devices, drafts apart ({ours.mode}), give {ours.measured.tokens_s:.0f} "
                f"tokens/s, all given to the target ({theirs.mode}) {theirs.measured.tokens_s:.0f}: drafts apart are "
                f"worth {'more' if ratio > 1 else 'less'}, x{ratio:.2f}"
            )
        return lines

    def _deaths(self) -> list[str]:
        lines = []
        for cell in self._cells:
            if cell.death is not None:
                plain = [c.measured.tokens_s for c in self._cells if c.mode == "none" and c.batch == cell.batch]
                lines.append(
                    f"batch {cell.batch}, {cell.mode}: {cell.measured.tokens_s:.0f} tokens/s, "
                    f"{cell.death.measured.tokens_s:.0f} after the drafters were killed"
                    + (f" (none: {plain[0]:.0f})" if plain else "")
                    + f"; longest round then {cell.death.longest_ms:.0f} ms; every token the target's own"
                )
        return lines

    def _over(self, cell: Cell, mode: Mode, among: Sequence[Cell]) -> float | None:
        """Measured speed over that of another mode at the same batch: none's, or one of the same k."""
        for other in among:
            if (
                other.mode == mode
                and other.batch == cell.batch
                and (mode == "none" or other.scenario.k == cell.scenario.k)
            ):
                return cell.measured.tokens_s / other.measured.tokens_s
        return None

    def _line(self, cell: Cell, among: Sequence[Cell]) -> str:
        measured, predicted = cell.measured, cell.predicted
        drafts = cell.mode != "none"
        over = [self._over(cell, "none", among), self._over(cell, "sync", among)]
        return (
            f"{cell.batch:>5} {cell.mode:<10}{cell.scenario.k if drafts else '-':>3}{cell.devices:>8}"
            f"{measured.tokens_s:>10.1f}{predicted.tokens_s:>10.1f}{measured.tokens_s / predicted.tokens_s - 1:>+6.0%}"
            + "".join(f"{x:>8.2f}" if x is not None else f"{'-':>8}" for x in over)
            + (f"{measured.hit:>6.0%}" if drafts else f"{'-':>6}")
            + f"{measured.tokens:>8.2f}{measured.round_ms:>8.1f}{cell.tokens_s_device:>10.1f}   {cell.because()}"
        )

    def _entry(self, cell: Cell, among: Sequence[Cell]) -> dict[str, Any]:
        return {
            "batch": cell.batch,
            "mode": cell.mode,
            "k": cell.scenario.k,
            "devices": cell.devices,
            "measured": asdict(cell.measured),
            "predicted": {
                **asdict(cell.predicted),
                "round_ms": cell.predicted.round_ms,
                "tokens_s": cell.predicted.tokens_s,
            },
            "tokens_s_device": cell.tokens_s_device,
            "over_none": self._over(cell, "none", among),
            "over_sync": self._over(cell, "sync", among),
            "played": asdict(cell.played),
            "because": cell.because(),
            "death": None if cell.death is None else asdict(cell.death),
        }
