"""Who takes part: engines, their settings, and what each run asks of them.

Knows: how every engine is set up for one target, with which ways of speculating, and which of them share a process.
Refuses to know: where a peer is installed (find.py), prompts, time.

Same for all: the weights' directory (or the GGUF they came from), threads, room for keys and values, end tokens.
Prefix caches are off. Peers otherwise run with their own defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Most prompts at once, for engines that take many.
SEQUENCES = 64
#: Drafts that cost no model, asked together.
CHEAP: tuple[Mapping[str, Any], ...] = ({"kind": "suffix"}, {"kind": "ngram"}, {"kind": "recycling"})
#: Tokens that prompt lookup guesses: what transformers' documentation and llama-cpp-python's advise (there: 2 on CPUs).
LOOKUP, LLAMA_LOOKUP = 10, 2
#: vLLM's drafts, as many tokens as its examples take.
VLLM_DRAFTS = 5


@dataclass(frozen=True)
class Contender:
    """One line of the table.

    name: as the table shows it. peer: whose interpreter runs it; "outrider" is this one. engine: a module of
    engines/. settings: what its process loads; contenders with equal settings share one. ask: added to each run.
    batch: most prompts at once. weights: what it reads for a token.
    """

    name: str
    peer: str
    engine: str
    settings: Mapping[str, Any]
    ask: Mapping[str, Any] = field(default_factory=dict)
    batch: int = SEQUENCES
    weights: str = "bfloat16"

    @property
    def process(self) -> str:
        """Equal for contenders that share a process."""
        return f"{self.engine} {json.dumps(self.settings, sort_keys=True, default=str)}"

    @property
    def ours(self) -> bool:
        return self.peer == "outrider"


@dataclass(frozen=True)
class Setup:
    """One target on this machine: model directories, its GGUF where there is one, and what all engines get alike."""

    target: Path
    draft: Path | None
    gguf: Path | None
    threads: int
    context: int
    cache: int


def line_up(setup: Setup) -> list[Contender]:
    """Everyone for this target; ours without speculation is first."""
    ours = _ours_alone(setup) if setup.draft is None else _ours_with_draft(setup)
    return [*ours, *_vllm(setup), *_transformers(setup), *_llama_cpp(setup)]


def _ours_alone(setup: Setup) -> Iterator[Contender]:
    yield _outrider(setup, "outrider none", ())
    yield _outrider(setup, "outrider blend", CHEAP)
    yield _outrider(setup, "outrider blend+int4", (*CHEAP, {"kind": "quantized", "bits": 4}))
    yield from _ours_packed(setup)


def _ours_packed(setup: Setup) -> Iterator[Contender]:
    """With the target's weights in four bits: `none` and the blend share a process."""
    for name, ask in (("none", {"speculation": {"enabled": False}}), ("blend", {})):
        yield _outrider(setup, f"outrider 4-bit {name}", CHEAP, ask=ask, target_bits=4)


def _ours_with_draft(setup: Setup) -> Iterator[Contender]:
    """`none` shares the first drafted engine's process: a second copy of the target would crowd out a peer."""
    draft = {"kind": "model", "model": str(setup.draft)}
    eight = (*CHEAP, draft | {"bits": 8})
    yield _outrider(setup, "outrider none", eight, ask={"speculation": {"enabled": False}})
    yield _outrider(setup, "outrider draft int8", eight)
    yield _outrider(setup, "outrider draft int4", (*CHEAP, draft | {"bits": 4}))
    yield from _ours_packed(setup)


def _outrider(
    setup: Setup,
    name: str,
    drafts: Sequence[Mapping[str, Any]],
    *,
    ask: Mapping[str, Any] | None = None,
    target_bits: int | None = None,
) -> Contender:
    config = {
        "target": {
            "model": str(setup.target),
            "dtype": "bfloat16",
            "threads": setup.threads,
            "max_context": setup.context,
            "bits": target_bits,
        },
        "drafts": list(drafts),
        "blend": "expected",
        "cache": {"memory": f"{setup.cache}", "prefix": False},
        "scheduler": {"max_sequences": SEQUENCES},
        "knobs": {"k": 15},
    }
    weights = "bfloat16" if target_bits is None else f"{target_bits} bits"
    return Contender(name, "outrider", "outrider", {"config": config}, ask or {}, weights=weights)


def _vllm(setup: Setup) -> Iterator[Contender]:
    settings = {
        "model": str(setup.target),
        "dtype": "bfloat16",
        "context": setup.context,
        "sequences": SEQUENCES,
        "cache": setup.cache,
    }
    ngram = {"method": "ngram", "num_speculative_tokens": VLLM_DRAFTS, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    yield Contender("vllm none", "vllm", "vllm", settings)
    yield Contender("vllm ngram", "vllm", "vllm", settings | {"speculative": ngram})
    if setup.draft is not None:
        drafted = {"method": "draft_model", "model": str(setup.draft), "num_speculative_tokens": VLLM_DRAFTS}
        yield Contender("vllm draft", "vllm", "vllm", settings | {"speculative": drafted})


def _transformers(setup: Setup) -> Iterator[Contender]:
    """All in one process; it speculates for one prompt at a time."""
    settings = {"model": str(setup.target), "draft": None, "dtype": "bfloat16", "threads": setup.threads}
    if setup.draft is not None:
        settings["draft"] = str(setup.draft)
    yield Contender("transformers none", "transformers", "transformers", settings)
    yield Contender("transformers lookup", "transformers", "transformers", settings, {"lookup": LOOKUP}, batch=1)
    if setup.draft is not None:
        yield Contender("transformers assisted", "transformers", "transformers", settings, {"assist": True}, batch=1)


def _llama_cpp(setup: Setup) -> Iterator[Contender]:
    """Without a GGUF the settings say so, and find.py tells the reader how to get one."""
    gguf = None if setup.gguf is None else str(setup.gguf)
    settings = {"gguf": gguf, "context": setup.context, "threads": setup.threads}
    weights = "GGUF" if setup.gguf is None else setup.gguf.stem.rpartition(".")[2]
    yield Contender("llama.cpp none", "llama.cpp", "llama_cpp", settings, batch=1, weights=weights)
    drafting = settings | {"lookup": LLAMA_LOOKUP}
    yield Contender("llama.cpp lookup", "llama.cpp", "llama_cpp", drafting, batch=1, weights=weights)
