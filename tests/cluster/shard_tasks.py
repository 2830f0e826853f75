"""What the ranks of an engine do in the processes of test_build_shards.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from cluster.build import Assembly, Meeting, assemble, assemble_shard
from cluster.config import CacheConfig, EngineConfig, KnobConfig, NgramDraft, RecyclingDraft, TargetConfig
from cluster.errors import PeerLost
from cluster.parallel.groups import Endpoint
from cluster.request import Request, Sampling

PROMPT = "the cat and the dog and the cat and the"


def config(model: str | Path, ranks: int) -> EngineConfig:
    return EngineConfig(
        target=TargetConfig(model=str(model), dtype="float32", tensor_parallel=ranks, threads=1),
        # Trees too: their parents, and the moves that lay an accepted path straight, reach every rank.
        drafts=(RecyclingDraft(kind="recycling", successors=3), NgramDraft(kind="ngram", min_match=1)),
        cache=CacheConfig(blocks=64, block_tokens=8),
        knobs=KnobConfig(k=4, token_budget=32, tree_nodes=8),
    )


def answer(assembly: Assembly, temperature: float, tokens: int = 12) -> tuple[int, ...]:
    prompt = tuple(assembly.tokenizer.encode(PROMPT))
    assembly.engine.submit(Request("r", prompt, Sampling(max_tokens=tokens, temperature=temperature, seed=3)))
    out: list[int] = []
    while assembly.engine.has_work:
        for delta in assembly.engine.step():
            out.extend(delta.tokens)
    return tuple(out)


def serve(endpoint: Endpoint, rank: int, size: int, model: str, idle_s: float, step_s: float) -> object:
    """Rank 0 answers twice, doing nothing for `idle_s` in between, and reports both; the others follow it."""
    meeting = Meeting(endpoint, ready_s=60, step_s=step_s)
    if rank > 0:
        assemble_shard(config(model, size), meeting, rank).follow()
        return "sent home"
    assembly = assemble(config(model, size), meeting=meeting)
    greedy = answer(assembly, 0.0)
    time.sleep(idle_s)
    drawn = answer(assembly, 1.0)
    assembly.engine.close()
    assembly.engine.check()
    return greedy, drawn


def last(
    endpoint: Endpoint, rank: int, size: int, model: str, idle: bool, step_s: float
) -> Iterator[tuple[str, float]]:
    """Rank 0 answers again and again, or once; a rank that loses another tells what it says, and when.

    Before that each tells that it is ready, rank 0 after an answer.
    """
    meeting = Meeting(endpoint, ready_s=60, step_s=step_s)
    try:
        if rank > 0:
            shard = assemble_shard(config(model, size), meeting, rank)
            yield "ready", time.monotonic()
            shard.follow()
        assembly = assemble(config(model, size), meeting=meeting)
        answer(assembly, 0.0)
        yield "ready", time.monotonic()
        if idle:
            time.sleep(600)
        while True:
            answer(assembly, 0.0)
    except PeerLost as error:
        yield str(error), time.monotonic()
