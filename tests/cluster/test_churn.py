"""Hundreds of requests come, stop and leave at random: nothing leaks and equal seeds agree."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest

from cluster.build import Assembly, assemble
from cluster.config import CacheConfig, EngineConfig, KnobConfig, ModelDraft, NgramDraft, SchedulerConfig, TargetConfig
from cluster.request import Request, Sampling, Speculation

SEEDS = 12
PROMPTS = ("the cat and the", "def return the", "on and on and on and on", "a")


def churn(made: Assembly, count: int, longest: int, rng: random.Random) -> dict[str, set[str]]:
    """Texts by what should determine them. Aborts happen between any two steps."""
    engine, tokenizer = made.engine, made.tokenizer
    total = engine.status.blocks_total
    texts: defaultdict[str, str] = defaultdict(str)
    finished: defaultdict[str, set[str]] = defaultdict(set)
    what: dict[str, str] = {}
    left = count
    while left or engine.has_work:
        for _ in range(min(left, rng.randrange(4))):
            left -= 1
            name = f"request-{left}"
            seed, prompt = rng.randrange(SEEDS), rng.choice(PROMPTS)
            length, stop = rng.choice((1, 5, longest)), rng.choice(((), ("e",), ("zz", "the")))
            what[name] = f"{seed} {prompt!r} {length} {stop}"
            sampling = Sampling(max_tokens=length, temperature=seed % 3 * 0.5, seed=seed, stop=stop, top_p=0.95)
            speculation = Speculation(enabled=rng.random() < 0.8, k=rng.choice((None, 1, 3)))
            engine.submit(Request(name, tuple(tokenizer.encode(prompt)), sampling, speculation))
        for delta in engine.step():
            texts[delta.request] += delta.text
            if delta.finish is not None:
                finished[what[delta.request]].add(texts.pop(delta.request))
        if what and rng.random() < 0.15:
            victim = rng.choice(list(what))
            engine.abort(victim)
            texts.pop(victim, None)
        engine.check()
    status = engine.status
    assert (status.running, status.waiting, status.blocks_owned) == (0, 0, 0)
    engine.forget_prefixes()
    assert engine.status.blocks_free == total
    return finished


def config(model: str, layers: tuple[int, ...], blocks: int) -> EngineConfig:
    return EngineConfig(
        target=TargetConfig(model=model, dtype="float32"),
        drafts=(NgramDraft(kind="ngram", min_match=1), ModelDraft(kind="model", layers=layers)),
        cache=CacheConfig(blocks=blocks, block_tokens=8),
        scheduler=SchedulerConfig(max_sequences=12, max_waiting=600),
        knobs=KnobConfig(k=4, token_budget=48),
    )


def test_500_requests_leave_nothing_behind(tiny_llama: Path) -> None:
    made = assemble(config(str(tiny_llama), (0, 2), blocks=24))
    finished = churn(made, 500, 24, random.Random(7))
    assert sum(map(len, finished.values())) > 100
    assert {key: texts for key, texts in finished.items() if len(texts) > 1} == {}


@pytest.mark.soak
def test_500_requests_leave_nothing_behind_on_the_real_model() -> None:
    made = assemble(config("smollm2-135m", (0, 1, 28, 29), blocks=96))
    finished = churn(made, 500, 48, random.Random(8))
    assert sum(map(len, finished.values())) > 100
    assert {key: texts for key, texts in finished.items() if len(texts) > 1} == {}
