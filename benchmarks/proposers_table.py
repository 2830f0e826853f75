"""The table of benchmarks.proposers: from records of answers and timings to markdown and JSON.

Same tokens: in float32 two answers are the same up to the first position whose two best tokens, noise
included, lie closer than 1e-4 in the stock model's logits (law 0); anything else is a failure. In
bfloat16 such near-ties are common and the share of equal answers is only told.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.acceptance import Round, alphas, loops, tau
from benchmarks.exactness import TIE, Reference
from benchmarks.proposers_speed import markdown as speed_table
from benchmarks.proposers_speed import speeds
from benchmarks.protocol import Prompt, report, seed_of

#: What tells one line of the table from another, beside the data file.
SETTING = ("target", "dtype", "draft", "proposer", "k", "temperature", "tokens")

Row = dict[str, Any]


def show(options: argparse.Namespace, rows: Sequence[Row], prompts: Mapping[str, Prompt]) -> int:
    """Print and write the table of the target and dtype asked for; 1 where an answer is wrong."""
    rows = [row for row in rows if (row["target"], row["dtype"]) == (options.target, options.dtype)]
    answers = [row for row in rows if row["what"] == "answer" and row["prompt"] in prompts]
    lines = judged([line(group, answers) for group in grouped(answers)], options, prompts)
    timed = speeds(rows)
    text = "\n\n".join(table for table in (lines and markdown(lines), timed and speed_table(timed)) if table)
    print(text)
    name = f"proposers-{Path(options.target).name}-{options.dtype}"
    (options.out / f"{name}.md").write_text(text + "\n")
    told = [entry | {"differing": [difference.record for difference in entry["differing"]]} for entry in lines]
    report(name, options.out, {"answers": told, "speeds": timed})
    wrong = [d for entry in lines for d in entry["differing"] if d.gap is not None and d.gap >= TIE]
    for difference in wrong:
        print(f"WRONG: {difference.record}")
    return 1 if wrong else 0


def grouped(answers: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in answers:
        groups.setdefault((kind_of(row), row["temperature"], *(row[name] for name in SETTING)), []).append(row)
    return list(groups.values())


def kind_of(row: Row) -> str:
    return str(row["prompt"]).split("/")[0]


def line(group: Sequence[Row], answers: Sequence[Row]) -> dict[str, Any]:
    """One line of the table: one proposer at one setting on one data file."""
    first = group[0]
    alone = {
        row["prompt"]: row["answer"]
        for row in answers
        if row["proposer"] == "none" and all(row[name] == first[name] for name in ("temperature", "tokens"))
    }
    compared = [(row["prompt"], alone[row["prompt"]], row["answer"]) for row in group if row["prompt"] in alone]
    rounds = [[Round(*entry) for entry in row["rounds"]] for row in group]
    every = [round for made in rounds for round in made]
    return {
        "kind": kind_of(first),
        **{name: first[name] for name in SETTING},
        "prompts": len(group),
        "compared": len(compared),
        "differing": [Difference.of(*three) for three in compared if three[1] != three[2]],
        "alphas": alphas(every, first["k"]),
        "tau": tau(every),
        "tau_loop_free": tau(
            [r for row, made in zip(group, rounds, strict=True) if not loops(row["answer"]) for r in made]
        ),
        "looping": sum(loops(row["answer"]) for row in group) / len(group),
        "rounds": len(every),
        "rounds_with_drafts": sum(round.drafted > 0 for round in every),
    }


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the one made alone, after `before`; how far apart the two best tokens are there."""

    prompt: str
    before: tuple[int, ...]
    gap: float | None = None  # not known: bfloat16, or not asked yet

    @classmethod
    def of(cls, prompt: str, alone: Sequence[int], answer: Sequence[int]) -> Difference:
        at = next((i for i, (a, b) in enumerate(zip(alone, answer, strict=False)) if a != b), None)
        return cls(prompt, tuple(alone[: min(len(alone), len(answer)) if at is None else at]))

    @property
    def record(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "position": len(self.before), "gap": self.gap}


def judged(
    lines: Sequence[dict[str, Any]], options: argparse.Namespace, prompts: Mapping[str, Prompt]
) -> list[dict[str, Any]]:
    """The lines with the gap of every difference, by the stock model in float32."""
    if options.dtype != "float32" or not any(entry["differing"] for entry in lines):
        return list(lines)
    reference = Reference(options.target, frozenset())

    def gap(difference: Difference, temperature: float) -> Difference:
        prompt = prompts[difference.prompt]
        return replace(
            difference, gap=reference.gap(prompt, difference.before, temperature, seed_of(difference.prompt))
        )

    return [
        entry | {"differing": [gap(difference, entry["temperature"]) for difference in entry["differing"]]}
        for entry in lines
    ]


def markdown(lines: Sequence[dict[str, Any]]) -> str:
    head = ["file", "T", "proposer", "k", "prompts", "same tokens", "alpha by position", "tau", "loop-free", "looping"]
    table = [head, ["---"] * len(head)]
    order = list(dict.fromkeys(entry["proposer"] for entry in lines))  # as they were run
    for entry in sorted(lines, key=lambda e: (e["kind"], e["temperature"], order.index(e["proposer"]), e["k"])):
        chances = " ".join("-" if alpha is None else f"{alpha:.2f}".lstrip("0") for alpha in entry["alphas"])
        table.append(
            [
                entry["kind"],
                f"{entry['temperature']:g}",
                entry["proposer"],
                f"{entry['k']}",
                f"{entry['prompts']}",
                same(entry),
                chances,
                f"{entry['tau']:.2f}",
                f"{entry['tau_loop_free']:.2f}",
                f"{entry['looping']:.0%}",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def same(entry: Mapping[str, Any]) -> str:
    """As "39/40, 1 near-tie"; nothing for none itself."""
    if entry["proposer"] == "none":
        return ""
    gaps = [difference.gap for difference in entry["differing"]]
    ties = sum(gap is not None and gap < TIE for gap in gaps)
    text = f"{entry['compared'] - len(gaps)}/{entry['compared']}"
    return text + (f", {ties} near-tie{'s' * (ties > 1)}" if ties else "")
