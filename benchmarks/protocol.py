"""What every benchmark here shares: prompts, pairing, and a report that says how it was made.

Prompts come from the project's own benchmarks/prompts, or from a directory of public benchmark files
(code.jsonl, chat.jsonl, json.jsonl) named with --data; those are not shipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.engine import Engine
from cluster.messages import Delta
from cluster.request import Request
from cluster.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """One prompt in ids, with the data file and the line it came from."""

    kind: str
    name: str
    ids: tuple[int, ...]


def read_prompts(data: Path, kind: str, tokenizer: Tokenizer, count: int | None = None) -> list[Prompt]:
    """Code prompts are continued as they are; the others go through the chat template."""
    path = data / f"{kind}.jsonl"
    if not path.is_file():
        raise SystemExit(f"no {path}: give the directory of prompt files with --data")
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [_prompt(kind, index, record, tokenizer) for index, record in enumerate(records[:count])]


def _prompt(kind: str, index: int, record: dict[str, Any], tokenizer: Tokenizer) -> Prompt:
    if kind == "code":
        return Prompt(kind, f"code/{index}", tuple(tokenizer.encode(record["prompt"])))
    if kind == "chat":
        text = record["turns"][0]
    else:
        text = "Generate a JSON object that conforms to this schema:\n" + json.dumps(record["schema"])
    return Prompt(kind, f"{kind}/{index}", tuple(tokenizer.encode_chat([{"role": "user", "content": text}])))


def seed_of(name: str) -> int:
    """A prompt's seed: the same however many others are asked."""
    return zlib.crc32(name.encode())


@dataclass(frozen=True)
class Outcome:
    """Answers of one run by request id, and how long it took."""

    tokens: dict[str, tuple[int, ...]]
    last: dict[str, Delta]
    seconds: float
    steps: int

    @property
    def speed(self) -> float:
        """Emitted tokens a second, prefill included."""
        return sum(map(len, self.tokens.values())) / self.seconds

    @property
    def tau(self) -> float:
        """Tokens a request's target step emitted, on average."""
        return sum(map(len, self.tokens.values())) / sum(delta.statistics.rounds for delta in self.last.values())

    @property
    def acceptance(self) -> float:
        drafted = sum(delta.statistics.drafted for delta in self.last.values())
        return sum(delta.statistics.accepted for delta in self.last.values()) / drafted if drafted else 0.0


def run(engine: Engine, requests: Sequence[Request]) -> Outcome:
    """All requests at once, to the end, with a cold prefix cache."""
    engine.forget_prefixes()
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    last: dict[str, Delta] = {}
    steps = engine.status.steps
    start = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request].extend(delta.tokens)
            last[delta.request] = delta
    seconds = time.perf_counter() - start
    return Outcome({name: tuple(ids) for name, ids in tokens.items()}, last, seconds, engine.status.steps - steps)


def interleave(contenders: dict[str, Callable[[int], float]], repeats: int) -> dict[str, list[float]]:
    """Each contender once a repeat, in turn, so that the machine's moods hit all alike."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name, contender in contenders.items():
            figures[name].append(contender(repeat))
    return figures


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios taken repeat by repeat."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    own = Path(__file__).parent / "prompts"
    parser.add_argument("--data", type=Path, default=own, help="directory of code.jsonl, chat.jsonl; default: our own")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"), help="where the JSON report goes")
    return parser


def report(name: str, out: Path, results: object) -> None:
    """Write results with the command, machine and versions that made them."""
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": {"cpu": cpu(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
        "versions": {package: version(package) for package in ("torch", "transformers")},
        "commit": commit(),
        "results": results,
    }
    path = out / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"report: {path}")


def commit() -> str:
    """Of the tree these benchmarks lie in; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def cpu() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
