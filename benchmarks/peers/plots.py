"""The pictures of a run: bars of speed, and curves over batch, context and draft length.

Knows: matplotlib, which only this file imports.
Refuses to know: how figures were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Line
from benchmarks.peers.table import AXES

_INCHES = (8.0, 4.5)
#: Of a curve: what is drawn of a line, and the y axis' name.
_DRAWN: dict[str, tuple[Callable[[Line], float | None], str]] = {
    "batch": (lambda line: line.decode, "tokens/s after the first"),
    "context": (lambda line: None if line.gaps is None else 1e3 * line.gaps[0], "ms between tokens, median"),
    "k": (lambda line: line.speed.median, "tokens/s"),
}


def draw(lines: Sequence[Line], curves: frozenset[tuple[str, str]], out: Path) -> list[Path]:
    """Write the pictures there is something to draw for; returns their files. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, and no display is looked for

    made = []

    def save(name: str, paint: Callable[[Any], None]) -> None:
        figure = Figure(figsize=_INCHES, layout="constrained")
        paint(figure.subplots())
        figure.savefig(out / f"{name}.png", dpi=120)
        made.append(out / f"{name}.png")

    for suite in dict.fromkeys(line.suite for line in lines):
        here = [line for line in lines if line.suite == suite]
        streams = [line for line in here if line.cell.endswith(" x1")]
        if streams:
            save(f"{suite}-speed", partial(_bars, lines=streams))
        for axis in AXES:
            points = [one for one in here if (suite, one.cell) in curves and one.cell.startswith(f"{axis} ")]
            if points:
                save(f"{suite}-{axis}", partial(_curve, lines=points, axis=axis))
    return made


def _bars(axes: Any, lines: Sequence[Line]) -> None:
    cells = list(dict.fromkeys(line.cell for line in lines))
    names = list(dict.fromkeys(line.contender for line in lines))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        known = {line.cell: line.speed.median for line in lines if line.contender == name}
        at = [index + place * width for index, cell in enumerate(cells) if cell in known]
        axes.bar(at, [known[cell] for cell in cells if cell in known], width, label=name)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(cells))], cells)
    axes.set_ylabel("tokens/s, prompt included")
    axes.legend(fontsize="small")


def _curve(axes: Any, lines: Sequence[Line], axis: str) -> None:
    value, label = _DRAWN[axis]
    for name in dict.fromkeys(line.contender for line in lines):
        mine = [line for line in lines if line.contender == name]
        points = sorted((int(one.cell.rpartition(" ")[2]), y) for one in mine if (y := value(one)) is not None)
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    if axis != "k":
        axes.set_xscale("log", base=2)
    axes.set_xlabel({"k": "k at most", "context": "tokens of context"}.get(axis, axis))
    axes.set_ylabel(label)
    axes.legend(fontsize="small")
