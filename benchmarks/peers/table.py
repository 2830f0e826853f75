"""The page of a run: what was asked, by whom, how fast; markdown that reads as it stands.

Knows: how figures are written.
Refuses to know: how they were computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.figures import Line, Spread
from benchmarks.peers.goals import Verdict

#: Shown of curves: which axis the cells of that name lie on, and what is plotted over it.
AXES = {"batch": "decoding, tokens/s", "context": "first token, ms | between tokens, ms", "k": "tokens/s"}


@dataclass(frozen=True)
class Page:
    """Everything a run has to say. facts: name and text, in order. out: by suite, contender and why it is out."""

    facts: Sequence[tuple[str, str]]
    lines: Sequence[Line]
    verdicts: Sequence[Verdict]
    memory: Mapping[str, Mapping[str, Mapping[str, int]]]
    weights: Mapping[str, str]
    out: Mapping[str, Mapping[str, str]]
    curves: frozenset[tuple[str, str]] = field(default_factory=frozenset)  # (suite, cell) shown as points


def markdown(page: Page) -> str:
    parts = ["\n".join(f"- {name}: {text}" for name, text in page.facts)]
    if page.verdicts:
        parts += ["### Goals", _goals(page.verdicts)]
    for suite in dict.fromkeys(line.suite for line in page.lines):
        lines = [line for line in page.lines if line.suite == suite]
        spoken = [line for line in lines if (suite, line.cell) not in page.curves]
        points = [line for line in lines if (suite, line.cell) in page.curves]
        parts.append(f"### {suite}")
        if spoken:
            parts.append(_speeds(spoken, page.weights))
        for axis, shown in AXES.items():
            if here := [line for line in points if line.cell.startswith(f"{axis} ")]:
                parts += [f"By {axis}: {shown}", _curve(here, axis)]
        if page.memory.get(suite):
            parts.append(_memory(page.memory[suite]))
    missing = [(suite, name, why) for suite, names in page.out.items() for name, why in names.items()]
    if missing:
        parts += ["### Not measured", "\n".join(f"- {suite}, {name}: {why}" for suite, name, why in missing)]
    return "\n\n".join(parts) + "\n"


def _goals(verdicts: Sequence[Verdict]) -> str:
    said = {True: "yes", False: "no", None: "not measured"}
    rows = [[v.goal, v.wanted, "" if v.seen is None else f"{v.seen:.2f}", said[v.reached], v.sides] for v in verdicts]
    return _table(["goal", "wanted", "seen", "reached", "who"], rows)


def _speeds(lines: Sequence[Line], weights: Mapping[str, str]) -> str:
    head = [
        "cell", "contender", "weights", "tokens/s", "to none (range, turns)", "loop-free", "first token, ms (p95)",
        "gap, ms (p95, p99)", "looping", "same text",
    ]  # fmt: skip
    rows = [
        [
            line.cell,
            line.contender,
            weights[line.contender],
            f"{line.speed.median:.1f}",
            _spread(line.ratio),
            "" if line.loop_free is None else f"{line.loop_free.median:.2f}",
            f"{_ms(line.first[0])} ({_ms(line.first[1])})",
            "" if line.gaps is None else f"{_ms(line.gaps[0])} ({_ms(line.gaps[1])}, {_ms(line.gaps[2])})",
            f"{line.looping:.0%}",
            "" if line.same is None else f"{line.same:.0%}",
        ]
        for line in lines
    ]
    return _table(head, rows)


def _curve(lines: Sequence[Line], axis: str) -> str:
    """Contenders down, points of the axis across."""
    points = sorted({int(line.cell.rpartition(" ")[2]) for line in lines})
    known = {(line.contender, int(line.cell.rpartition(" ")[2])): line for line in lines}
    rows = [
        [name, *(_point(known.get((name, point)), axis) for point in points)]
        for name in dict.fromkeys(line.contender for line in lines)
    ]
    return _table([axis, *map(str, points)], rows)


def _point(line: Line | None, axis: str) -> str:
    if line is None:
        return ""
    if axis == "context":
        return f"{_ms(line.first[0])} \\| {'' if line.gaps is None else _ms(line.gaps[0])}"
    value = line.decode if axis == "batch" else line.speed.median
    return "" if value is None else f"{value:.1f}"


def _memory(memory: Mapping[str, Mapping[str, int]]) -> str:
    rows = [[name, f"{told['peak'] / 2**20:.0f}", f"{told['now'] / 2**20:.0f}"] for name, told in memory.items()]
    return _table(["memory, MiB", "peak", "at the end"], rows)


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.2f} ({spread.least:.2f} to {spread.greatest:.2f}, {spread.count})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
