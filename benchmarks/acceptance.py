"""What became of drafts, round by round: acceptance by position, tokens a target step, loops.

A round is one target step of one request after the step that computed its prompt.

Run by itself it writes what `outrider simulate --acceptance` reads: acceptance by position on each data
file, out of the answers that benchmarks.proposers recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: An answer loops when its end repeats a piece of at most this many tokens ...
_LONGEST_PIECE = 32
#: ... so often, and over at least so many tokens.
_TIMES, _FEWEST = 3, 24


@dataclass(frozen=True, slots=True)
class Round:
    """Draft tokens checked (of a tree: its depth), how many stood, and tokens emitted."""

    drafted: int
    accepted: int
    emitted: int

    @property
    def ended_inside(self) -> bool:
        """The answer ended with an accepted draft: what came after it was never judged."""
        return self.emitted == self.accepted


def alphas(rounds: Iterable[Round], k: int) -> list[float | None]:
    """For each position, the chance that a draft stood given that those before it did; None: never reached."""
    stood, judged = [0] * k, [0] * k
    for one in rounds:
        fell = one.accepted < one.drafted and not one.ended_inside
        for position in range(min(k, one.accepted + fell)):
            judged[position] += 1
            stood[position] += position < one.accepted
    return [good / all_ if all_ else None for good, all_ in zip(stood, judged, strict=True)]


def tau(rounds: Sequence[Round]) -> float:
    """Tokens a target step emitted on average, its own included."""
    return sum(one.emitted for one in rounds) / len(rounds) if rounds else 0.0


def loops(answer: Sequence[int]) -> bool:
    """Whether the answer ends in a short piece repeated over and over."""
    for piece in range(1, _LONGEST_PIECE + 1):
        span = max(_TIMES * piece, _FEWEST)
        tail = answer[-span:]
        if len(tail) == span and all(a == b for a, b in zip(tail, tail[piece:], strict=False)):
            return True
    return False


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Records of benchmarks.proposers, one JSON object a line; an interrupted run may have left half a line."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def measured(rows: Iterable[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of the recorded answers that are as `wanted`, by data file: acceptance by position, tau, how many there were."""
    answers: dict[str, list[list[Round]]] = {}
    for row in rows:
        if row["what"] == "answer" and all(row[name] == value for name, value in wanted.items()):
            answers.setdefault(row["prompt"].split("/")[0], []).append([Round(*entry) for entry in row["rounds"]])
    rounds = {kind: [one for made in answers[kind] for one in made] for kind in sorted(answers)}
    return {
        "acceptance": {kind: _reached(alphas(every, wanted["k"])) for kind, every in rounds.items()},
        "tau": {kind: round(tau(every), 3) for kind, every in rounds.items()},
        "rounds": {kind: len(every) for kind, every in rounds.items()},
        "answers": {kind: len(answers[kind]) for kind in rounds},
    }


def _reached(chances: Sequence[float | None]) -> list[float]:
    """As far as drafts ever stood."""
    return [round(chance, 4) for chance in chances if chance is not None]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("records", type=Path, help="the proposers.jsonl of benchmarks.proposers")
    add("--made-with", required=True, help="the command that made the records, to be kept beside the figures")
    add("--target", default="qwen2.5-coder-1.5b")
    add("--draft", default="qwen2.5-coder-0.5b")
    add("--dtype", default="bfloat16")
    add("--k", type=int, default=8)
    add("--temperature", type=float, default=0.0)
    add("--out", type=Path, default=Path(__file__).parent / "acceptance.json")
    options = parser.parse_args(argv)
    wanted = {name: getattr(options, name) for name in ("target", "draft", "dtype", "k", "temperature")}
    rows = read_rows(options.records)
    record = {"command": options.made_with, **wanted, **measured(rows, wanted | {"proposer": "draft"})}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
