"""The speed table of benchmarks.proposers: tokens a second and how they compare with none in the same turn.

Knows: records of timed turns. Refuses to know: answers; a turn says how fast, not whether right.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

#: What tells one line from another; batches are columns.
LINE = ("kind", "temperature", "draft", "proposer", "k", "tokens")

Row = dict[str, Any]


def speeds(rows: Sequence[Row]) -> list[Row]:
    """One entry a (file, proposer): by batch, the median tokens a second, the median of their ratio to those of
    none in the same turn, its least and greatest, and the number of turns. Turns without none are left out."""
    turns = [row for row in rows if row["what"] == "time"]
    made: dict[tuple[Any, ...], dict[int, list[tuple[float, float]]]] = {}
    none = {turn(row): row["speed"] for row in turns if row["proposer"] == "none"}
    for row in turns:
        if (alone := none.get(turn(row))) is not None:
            cells = made.setdefault(tuple(row[name] for name in LINE), {})
            cells.setdefault(row["batch"], []).append((row["speed"], row["speed"] / alone))
    return [
        dict(zip(LINE, line, strict=True)) | {"batches": {batch: cell(pairs) for batch, pairs in sorted(cells.items())}}
        for line, cells in made.items()
    ]


def turn(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("kind", "batch", "repeat", "temperature", "tokens"))


def cell(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """pairs: (tokens a second, ratio to none) of each turn."""
    ratios = [ratio for _, ratio in pairs]
    return {
        "speed": statistics.median(speed for speed, _ in pairs),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "greatest": max(ratios),
        "turns": len(pairs),
    }


def markdown(entries: Sequence[Row]) -> str:
    """A line a (file, proposer): for each batch "tokens/s" and "ratio (least to greatest, turns)"."""
    batches = sorted({batch for entry in entries for batch in entry["batches"]})
    head = ["file", "proposer", "k at most"]
    for batch in batches:
        head += [f"tokens/s, batch {batch}", "against none (range, turns)"]
    table = [head, ["---"] * len(head)]
    order = list(dict.fromkeys(entry["proposer"] for entry in entries))
    for entry in sorted(entries, key=lambda e: (e["kind"], e["temperature"], order.index(e["proposer"]))):
        cells = [entry["kind"], entry["proposer"], f"{entry['k']}"]
        for batch in batches:
            cells += written(entry["batches"].get(batch))
        table.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def written(found: dict[str, float] | None) -> list[str]:
    if found is None:
        return ["", ""]
    spread = f"{found['least']:.2f} to {found['greatest']:.2f}, {found['turns']}"
    return [f"{found['speed']:.1f}", f"{found['ratio']:.2f} ({spread})"]
