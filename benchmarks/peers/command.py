"""The command `outrider bench`: ours and every peer that is installed, on the same prompts, in turns.

Knows: which suites there are, how the minutes are shared, and what is written: turns as they happen, then the page, its
figures and its pictures.
Refuses to know: how engines are driven (process.py), who takes part (contenders.py), what figures mean (figures.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

import torch

from benchmarks.peers import find, plots
from benchmarks.peers.arguments import PEERS
from benchmarks.peers.cells import Cell, Prompts, cells
from benchmarks.peers.contenders import Contender, Setup, line_up
from benchmarks.peers.figures import lines
from benchmarks.peers.goals import Verdict, verdicts
from benchmarks.peers.process import EngineProcess
from benchmarks.peers.start import first_token_s
from benchmarks.peers.table import Page, markdown
from benchmarks.peers.turns import Match, Standing, Turn
from benchmarks.protocol import commit, cpu
from cluster.config import parse_bytes
from cluster.errors import ConfigError, ModelNotFound
from cluster.kernels.library import open_library
from cluster.model.alias import ALIASES, WheelGguf
from cluster.model.device import available_memory
from cluster.model.files import weight_files
from cluster.model.load import locate
from cluster.text.tokenizer import Tokenizer

Report = Callable[[str], None]

#: Target and draft of each suite, by alias.
MODELS: Mapping[str, tuple[str, str | None]] = {
    "smollm2": ("smollm2-135m", None),
    "pair": ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"),
}
#: Longest context of any cell, its answer included.
_CONTEXT = 8192
#: The reference of every ratio.
_NONE = "outrider none"
#: Room a process needs beside its weights (in bfloat16, and what is made of them) and its keys and values.
_WEIGHTS, _BESIDE = 1.4, 1.2 * 2**30
#: Goals that are not ratios of speeds.
_START_S, _STARTS = 5.0, 3


@dataclass(frozen=True)
class Suite:
    """One target with everyone who plays for it."""

    name: str
    contenders: tuple[Contender, ...]
    cells: tuple[Cell, ...]
    prompts: Prompts
    end: tuple[int, ...]
    bytes: int  # of a process's weights, roughly


def run(arguments: argparse.Namespace, progress: Report) -> int:
    """Measure and write; 0 also where peers are missing, 1 where nothing of ours could be measured."""
    began = time.monotonic()
    named = find.given(arguments.peer_python, "--peer-python", PEERS)
    ggufs = find.given(arguments.gguf, "--gguf", [target for target, _ in MODELS.values()])
    threads = arguments.threads or len(os.sched_getaffinity(0))
    cache = _cache_bytes(arguments.kv_memory)
    data = arguments.data or Path(__file__).resolve().parent.parent / "prompts"
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    open_library()  # compiled before anything is timed
    pythons = {peer: find.interpreter(peer, named) for peer in ("outrider", *PEERS)}
    suites, standings = _suites(arguments, ggufs, threads, cache, data, progress)
    turns: list[Turn] = []
    starts: list[float] = []
    with (out / "turns.jsonl").open("w") as file, _ended_early(progress):
        if "latency" in arguments.parts and arguments.contenders is None and "smollm2" in arguments.suites:
            starts += first_token_s(MODELS["smollm2"][0], _STARTS)
        for left, suite in zip(range(len(suites), 0, -1), suites, strict=True):
            playing, absent = _present(suite.contenders, pythons)
            progress(f"{suite.name}: {', '.join(contender.name for contender in playing)}")
            match = _match(suite, playing, pythons, threads, cache, _noting(turns, file), out, progress)
            standings[suite.name] = match.standing
            match.standing.out.update(absent)
            now = time.monotonic()
            match.play(suite.cells, arguments.repeats, now + (began + 60 * arguments.minutes - now) / left)
    found = lines(turns, _NONE)
    page = Page(
        facts=_facts(standings, threads, arguments, time.monotonic() - began),
        lines=found,
        verdicts=[*verdicts(turns), *_others(standings, starts)],
        memory={name: standing.memory for name, standing in standings.items()},
        weights={contender.name: contender.weights for suite in suites for contender in suite.contenders},
        out={name: standing.out for name, standing in standings.items()},
        curves=frozenset((s.name, cell.name) for s in suites for cell in s.cells if cell.part == "curves"),
    )
    _write(page, standings, starts, out, progress)
    return 0 if any(line.contender.startswith("outrider") for line in found) else 1


def _cache_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--kv-memory {text}: {error}") from None


def _setup(name: str, ggufs: Mapping[str, Path], threads: int, cache: int, progress: Report) -> Setup:
    """The suite's models on this machine. Raises ModelNotFound where they were never fetched."""
    target, draft = MODELS[name]
    directory = locate(target, progress).directory
    second = None if draft is None else locate(draft, progress).directory
    return Setup(directory, second, ggufs.get(target) or _packaged_gguf(target), threads, _CONTEXT, cache)


def _packaged_gguf(alias: str) -> Path | None:
    """The file inside an installed package; None where the GGUF came in parts, which are not kept."""
    source = ALIASES[alias].source if alias in ALIASES else None
    return source.fetch(Path(), lambda _: None) if isinstance(source, WheelGguf) else None


def _suites(
    arguments: argparse.Namespace,
    ggufs: Mapping[str, Path],
    threads: int,
    cache: int,
    data: Path,
    progress: Report,
) -> tuple[list[Suite], dict[str, Standing]]:
    """The suites whose models are here, and what is said of the others. Raises ConfigError for a name no suite has."""
    made, absent = [], {}
    for name in arguments.suites:
        try:
            made.append(_suite(name, _setup(name, ggufs, threads, cache, progress), arguments, data))
        except ModelNotFound as error:
            absent[name] = Standing(out={"everyone": str(error)})
    _check("--contenders", arguments.contenders, [c.name for suite in made for c in suite.contenders])
    _check("--cells", arguments.cells, [cell.name for suite in made for cell in suite.cells])
    contenders, cells_ = arguments.contenders, arguments.cells
    return [
        replace(
            suite,
            contenders=tuple(c for c in suite.contenders if contenders is None or c.name in (*contenders, _NONE)),
            cells=tuple(cell for cell in suite.cells if cells_ is None or cell.name in cells_),
        )
        for suite in made
    ], absent


def _suite(name: str, setup: Setup, arguments: argparse.Namespace, data: Path) -> Suite:
    tokenizer = Tokenizer.load(setup.target)
    prompts = Prompts(data, tokenizer)
    every = cells(arguments.parts, prompts.kinds, arguments.tokens, pair=setup.draft is not None)
    read = sum(path.stat().st_size for folder in (setup.target, setup.draft) if folder for path in weight_files(folder))
    return Suite(name, tuple(line_up(setup)), tuple(every), prompts, tuple(sorted(tokenizer.eos_ids)), read // 2)


def _check(option: str, names: Sequence[str] | None, known: Sequence[str]) -> None:
    if unknown := [name for name in names or () if name not in known]:
        raise ConfigError(f"{option} {', '.join(unknown)}: there are {', '.join(dict.fromkeys(known))}")


def _present(
    contenders: Sequence[Contender], pythons: Mapping[str, Path | find.Missing]
) -> tuple[list[Contender], dict[str, str]]:
    """Those whose engine and model are here, and why the others are not."""
    playing, absent = [], {}
    for contender in contenders:
        python = pythons[contender.peer]
        if isinstance(python, find.Missing):
            absent[contender.name] = python.why
        elif contender.peer == "llama.cpp" and contender.settings["gguf"] is None:
            absent[contender.name] = (
                "no GGUF of this model: keep one with `outrider fetch --gguf DIR`, name it with --gguf"
            )
        else:
            playing.append(contender)
    return playing, absent


def _match(
    suite: Suite,
    playing: Sequence[Contender],
    pythons: Mapping[str, Path | find.Missing],
    threads: int,
    cache: int,
    note: Callable[[Turn], None],
    out: Path,
    progress: Report,
) -> Match:
    def open_process(contender: Contender) -> EngineProcess:
        python = pythons[contender.peer]
        assert isinstance(python, Path)
        log = out / f"{suite.name}-{contender.name.replace(' ', '-')}.log"
        return EngineProcess(python, contender.engine, find.environment(contender.peer, python, threads), log)

    def room_for_one() -> bool:
        needed = suite.bytes * _WEIGHTS + cache + _BESIDE
        return needed < available_memory(torch.device("cpu"))

    return Match(
        suite.name,
        playing,
        suite.prompts,
        suite.end,
        open_process=open_process,
        room_for_one=room_for_one,
        note=note,
        progress=progress,
    )


def _noting(turns: list[Turn], file: TextIO) -> Callable[[Turn], None]:
    """Keep a turn, and write it down at once."""

    def note(turn: Turn) -> None:
        turns.append(turn)
        file.write(json.dumps(asdict(turn)) + "\n")
        file.flush()

    return note


@contextlib.contextmanager
def _ended_early(progress: Report) -> Iterator[None]:
    """Ctrl-C ends the measuring, not the page; what fails before or between turns is told on it too."""
    try:
        yield
    except KeyboardInterrupt:
        progress("interrupted: the page holds what was measured so far")


def _others(standings: Mapping[str, Standing], starts: Sequence[float]) -> list[Verdict]:
    """The goals that are not about speed."""
    made = []
    memory = standings["smollm2"].memory if "smollm2" in standings else {}
    if _NONE in memory and "vllm none" in memory:
        share = memory[_NONE]["peak"] / memory["vllm none"]["peak"]
        text = "peak memory for the same keys and values, to vLLM's"
        made.append(Verdict(text, "< 1", share, f"{_NONE} / vllm none", share < 1))
    if starts:
        seen = statistics.median(starts)
        made.append(Verdict("`outrider generate` to its first token, s", "< 5", seen, "warm cache", seen < _START_S))
    return made


def _facts(
    standings: Mapping[str, Standing], threads: int, arguments: argparse.Namespace, took_s: float
) -> list[tuple[str, str]]:
    versions = {name: text for s in standings.values() for told in s.versions.values() for name, text in told.items()}
    load = os.getloadavg()[2]
    return [
        ("command", f"`outrider {shlex.join(sys.argv[1:])}`" if sys.argv[1:] else "`outrider bench`"),
        ("machine", f"{cpu()}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}"),
        ("threads", f"{threads} each; load average of the last quarter of an hour {load:.1f}"),
        ("versions", ", ".join(f"{name} {text}" for name, text in sorted(versions.items()))),
        ("commit", commit() or "not a checkout"),
        ("protocol", _PROTOCOL.format(tokens=arguments.tokens, minutes=took_s / 60)),
    ]


_PROTOCOL = (
    "greedy, at most {tokens} new tokens, ends respected, prefix caches off, every prompt cold; the same token ids "
    "to all; one engine computing at a time, in turns; medians; {minutes:.1f} minutes in all"
)


def _write(page: Page, standings: Mapping[str, Standing], starts: Sequence[float], out: Path, progress: Report) -> None:
    text = markdown(page)
    (out / "bench.md").write_text(text)
    document = {
        "facts": dict(page.facts),
        "goals": [asdict(verdict) for verdict in page.verdicts],
        "lines": [asdict(line) for line in page.lines],
        "suites": {name: asdict(standing) for name, standing in standings.items()},
        "starts_s": list(starts),
    }
    (out / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    print(text)
    written = [out / "bench.md", out / "bench.json", out / "turns.jsonl"]
    try:
        written += plots.draw(page.lines, page.curves, out)
    except ImportError:
        progress("no pictures: matplotlib is not installed (pip install 'outrider[bench]')")
    progress(f"written: {', '.join(map(str, written))}")
