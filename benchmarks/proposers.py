"""Every proposer against none: same tokens, acceptance by position, tokens a target step, tokens a second.

    counts   equality and acceptance. Requests are independent (a salt each, so nothing is learned from
             another's text) and run side by side, k fixed; the machine may be busy.
    timed    tokens a second, with against without, contenders in turn, adaptive draft lengths; wants a
             quiet machine, and ends after --minutes.
    table    what is known so far, as markdown and JSON. The others end with it.

Each finished answer and each timing is appended to <out>/proposers.jsonl at once and not made again:
an interrupted run goes on where it stopped, and timed runs add up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.acceptance import Round, read_rows
from benchmarks.exactness import LAYERS
from benchmarks.proposers_table import SETTING, show
from benchmarks.protocol import Prompt, arguments, read_prompts, run, seed_of
from cluster.build import Assembly, assemble
from cluster.config import (
    DraftConfig,
    EngineConfig,
    KnobConfig,
    ModelDraft,
    NgramDraft,
    QuantizedDraft,
    RecyclingDraft,
    SchedulerConfig,
    Seq2SeqDraft,
    SuffixDraft,
    TargetConfig,
    TranslatedDraft,
)
from cluster.engine import Engine
from cluster.messages import Statistics
from cluster.model.load import locate
from cluster.request import MOST_RETRIES, Request, Sampling
from cluster.text.tokenizer import Tokenizer

KINDS = ("code", "chat", "json")
CONTEXT = 4096
#: Nodes a request's tree may have where answers are counted.
TREE_NODES = 32
_FREE: tuple[DraftConfig, ...] = (
    SuffixDraft(kind="suffix"),
    NgramDraft(kind="ngram"),
    RecyclingDraft(kind="recycling"),
)


@dataclass(frozen=True)
class Contender:
    """A proposer, or several and how they are blended."""

    drafts: tuple[DraftConfig, ...]
    blend: str = "first"


def contenders(draft: str | None, seq2seq: str | None = None) -> Mapping[str, Contender]:
    """All there are by name; `draft` names a second model, `seq2seq` an encoder-decoder."""
    made = {
        "none": Contender(()),
        "ngram": Contender((NgramDraft(kind="ngram"),)),
        "suffix": Contender((SuffixDraft(kind="suffix"),)),
        "recycling": Contender((RecyclingDraft(kind="recycling"),)),
        "suffix tree": Contender((SuffixDraft(kind="suffix", tree=True),)),
        "recycling tree": Contender((RecyclingDraft(kind="recycling", successors=4),)),
        "layers": Contender((LAYERS,)),
        "int8": Contender((QuantizedDraft(kind="quantized", bits=8),)),
        "int4": Contender((QuantizedDraft(kind="quantized", bits=4),)),
        "first": Contender(_FREE),
        "expected": Contender(_FREE, "expected"),
    }
    if draft is not None:
        made["draft"] = Contender((ModelDraft(kind="model", model=draft),))
        made["translated"] = Contender((TranslatedDraft(kind="translated", model=draft, bits=8),))
    if seq2seq is not None:
        made["seq2seq"] = Contender((Seq2SeqDraft(kind="seq2seq", model=seq2seq),))
    return made


class Records:
    """The file of everything measured so far; one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = read_rows(path) if path.exists() else []
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            with path.open("a") as file:  # close the half line of an interrupted run
                file.write("\n")

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def engine_for(options: argparse.Namespace, contender: Contender, knobs: KnobConfig, batch: int) -> Assembly:
    return assemble(
        EngineConfig(
            target=TargetConfig(model=options.target, dtype=options.dtype, max_context=CONTEXT),
            drafts=contender.drafts,
            blend=contender.blend,
            scheduler=SchedulerConfig(max_sequences=batch, max_waiting=4096),
            knobs=knobs,
        )
    )


def requests(prompts: Sequence[Prompt], temperature: float, tokens: int) -> list[Request]:
    """Each under a salt of its own: what one teaches a proposer helps no other."""
    return [
        Request(p.name, p.ids, Sampling(max_tokens=tokens, temperature=temperature, seed=seed_of(p.name)), salt=p.name)
        for p in prompts
    ]


def answers(engine: Engine, asked: Sequence[Request]) -> Iterator[tuple[str, list[int], list[Round]]]:
    """Id, answer and rounds of each request, as they finish."""
    for request in asked:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in asked}
    rounds: dict[str, list[Round]] = {request.id: [] for request in asked}
    before: dict[str, Statistics] = {}
    while engine.has_work:
        for delta in engine.step():
            name, now, then = delta.request, delta.statistics, before.get(delta.request)
            tokens[name].extend(delta.tokens)
            if then is not None:  # the first step computed the prompt
                depth = sum(now.drafted_by_position) - sum(then.drafted_by_position)
                rounds[name].append(Round(depth, now.accepted - then.accepted, len(delta.tokens)))
            before[name] = now
            if delta.finish is not None:
                yield name, tokens.pop(name), rounds.pop(name)


def key(row: Mapping[str, Any]) -> tuple[object, ...]:
    """What an answer's record depends on."""
    return tuple(row[name] for name in (*SETTING, "prompt", "text"))


def count(options: argparse.Namespace, records: Records, prompts: Sequence[Prompt]) -> None:
    """Make every answer that is not recorded yet."""
    known = {key(row) for row in records.rows if row["what"] == "answer"}
    chosen = contenders(options.draft, options.seq2seq)
    for k in options.k:
        for name in options.proposers:
            room = TREE_NODES * options.batch
            knobs = KnobConfig(k=0 if name == "none" else k, adaptive=False, max_retries=MOST_RETRIES, tree_nodes=room)
            made: Assembly | None = None
            for temperature in options.temperatures:
                setting = setting_of(options, name, temperature, 0 if name == "none" else k)
                rows = {
                    p.name: {**setting, "prompt": p.name, "text": zlib.crc32(repr(p.ids).encode())} for p in prompts
                }
                left = [p for p in prompts if key(rows[p.name]) not in known]
                if not left:
                    continue
                made = made or engine_for(options, chosen[name], knobs, options.batch)
                began = time.perf_counter()
                for prompt, answer, rounds in answers(made.engine, requests(left, temperature, options.tokens)):
                    row = rows[prompt] | {"what": "answer", "answer": answer, "rounds": [astuple(r) for r in rounds]}
                    records.add(row)
                    known.add(key(row))
                print(f"{name} k {k} temperature {temperature:g}: {time.perf_counter() - began:.0f} s", flush=True)


def setting_of(options: argparse.Namespace, proposer: str, temperature: float, k: int) -> dict[str, Any]:
    return {
        "target": options.target,
        "dtype": options.dtype,
        "draft": {"draft": options.draft, "translated": options.draft, "seq2seq": options.seq2seq}.get(proposer),
        "proposer": proposer,
        "k": k,
        "temperature": temperature,
        "tokens": options.tokens,
    }


def timed(options: argparse.Namespace, records: Records, prompts: Sequence[Prompt]) -> None:
    """Contenders in turn on the same prompts until the time is over; a turn begun is finished."""
    chosen = {
        name: c
        for name, c in contenders(options.draft, options.seq2seq).items()
        if name in {"none", *options.proposers}
    }
    knobs = KnobConfig(k=max(options.k))
    made = {name: engine_for(options, contender, knobs, max(options.batches)) for name, contender in chosen.items()}
    print(f"{len(made)} engines are loaded", flush=True)
    repeat = sum(row["what"] == "time" and row["proposer"] == "none" for row in records.rows)
    end = time.monotonic() + 60 * options.minutes
    cells = [(batch, kind) for batch in options.batches for kind in options.kinds]
    while time.monotonic() < end:
        batch, kind = cells[repeat % len(cells)]
        group = pick([p for p in prompts if p.kind == kind], batch, repeat // len(cells))
        for name in sorted(
            made, key=lambda name: (zlib.crc32(f"{repeat}{name}".encode()), name)
        ):  # no one always first
            asked = requests(group, options.temperatures[0], options.tokens)
            speed = run(made[name].engine, asked).speed
            setting = setting_of(options, name, options.temperatures[0], max(options.k))
            records.add(setting | {"what": "time", "kind": kind, "batch": batch, "repeat": repeat, "speed": speed})
        print(f"{kind} batch {batch} repeat {repeat // len(cells)}", flush=True)
        repeat += 1


def pick(prompts: Sequence[Prompt], size: int, repeat: int) -> list[Prompt]:
    """Each repeat the next `size` prompts, walking round; a prompt met again runs under a new salt."""
    picked = [prompts[(repeat * size + i) % len(prompts)] for i in range(size)]
    return [replace(prompt, name=f"{prompt.name}:{repeat}:{i}") for i, prompt in enumerate(picked)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("part", choices=("counts", "timed", "table"))
    add("--target", default="smollm2-135m")
    add("--draft", help="a second model: with the target's vocabulary `draft`, with another `translated`")
    add("--seq2seq", help="directory of an encoder-decoder, such as benchmarks.seq2seq_draft makes")
    add("--proposers", nargs="+", help="default: all that need no second model, or with --draft: none draft")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="data files; those absent are left out")
    add("--count", type=int, default=40, help="prompts of each file")
    add("--tokens", type=int, default=128)
    add("--k", type=int, nargs="+", default=[8])
    add("--temperatures", type=float, nargs="+", default=[0.0], help="above 0 the rule is `coupled` too")
    add("--batch", type=int, default=16, help="counts: requests side by side")
    add("--batches", type=int, nargs="+", default=[1, 8], help="timed: requests side by side")
    add("--minutes", type=float, default=10.0, help="timed: begin no new turn after so long")
    options = parser.parse_args(argv)
    known = contenders(options.draft, options.seq2seq)
    options.proposers = options.proposers or (["none", "draft"] if options.draft else list(known))
    if unknown := [name for name in options.proposers if name not in known]:
        parser.error(f"no proposer {', '.join(unknown)}; there are {', '.join(known)}")
    options.kinds = [kind for kind in options.kinds if (options.data / f"{kind}.jsonl").is_file()]
    tokenizer = Tokenizer.load(locate(options.target).directory)
    prompts = [p for kind in options.kinds for p in read_prompts(options.data, kind, tokenizer, options.count)]
    records = Records(options.out / "proposers.jsonl")
    if options.part != "table":
        {"counts": count, "timed": timed}[options.part](options, records, prompts)
    return show(options, records.rows, {prompt.name: prompt for prompt in prompts})


if __name__ == "__main__":
    sys.exit(main())
