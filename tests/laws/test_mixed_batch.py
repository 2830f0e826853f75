"""A batch of 64 in which no two rows ask for the same: each says what it says alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.build import assemble
from cluster.config import parse
from cluster.engine import Engine
from cluster.messages import Knobs
from cluster.request import Request, Sampling, Speculation
from tests.fakes import Answer, FakeSetup, HashedLaws, Liar, OracleProposer, draft_proposer, fake_engine, ngram, run

ROWS = 64
EXACT = ("coupled", "ratio", "block")
LOSSY = ("threshold", "typical")


def rows(vocab: int, methods: tuple[str | None, ...], longest: int, seed: int) -> list[Request]:
    """Every rule, method, k and penalty somewhere. Under ratio and block only greedy rows say the same each time."""
    chance = random.Random(seed)
    asked = []
    for n in range(ROWS):
        rule = (*EXACT, "coupled", *LOSSY)[n % 6]
        sampling = Sampling(
            max_tokens=chance.randint(1, longest),
            temperature=chance.choice((0.0, 0.7, 1.5)) if rule == "coupled" else 0.0,
            top_p=chance.choice((1.0, 0.9)),
            top_k=chance.choice((0, 0, 5)),
            min_p=chance.choice((0.0, 0.05)),
            repetition_penalty=chance.choice((1.0, 1.3)),
            presence_penalty=chance.choice((0.0, 0.5)),
            frequency_penalty=chance.choice((0.0, 0.0, 1.0)),
            logit_bias={chance.randrange(vocab): chance.choice((-100.0, 2.0))} if n % 5 == 0 else {},
            seed=chance.randrange(2**40),
            ignore_eos=chance.random() < 0.7,
            logprobs=chance.choice((None, 0, 2)),
            bad_ids=((chance.randrange(vocab),),) if n % 7 == 0 else (),
            thinking_tokens=chance.randint(0, longest) if n % 9 == 0 else None,
            think_end=(1, 2) if n % 9 == 0 else (),
        )
        sampling = replace(sampling, min_tokens=chance.randint(0, sampling.max_tokens) if n % 4 == 0 else 0)
        drafting = Speculation(
            enabled=n % 11 != 0, k=chance.choice((None, 0, 1, 3, 8)), rule=rule, method=methods[n % len(methods)]
        )
        prompt = [chance.randrange(1, vocab)] * chance.randint(1, 3) + [chance.randrange(vocab) for _ in range(n % 17)]
        asked.append(Request(f"r{n}", tuple(prompt), sampling, drafting, salt=chance.choice(("", "tenant"))))
    return asked


def batched(
    engine: Engine, asked: list[Request], aborts: Mapping[str, int], *, preempting: bool = False
) -> dict[str, list[int]]:
    """Tokens by request; aborts: step at which a request is dropped. preempting: at least one row must give way."""
    preemptions = 0
    said: dict[str, list[int]] = {request.id: [] for request in asked}
    for request in asked:
        engine.submit(request)
    for step in range(5000):
        for name in [name for name, at in aborts.items() if at == step]:
            engine.abort(name)
        if not engine.has_work:
            break
        for delta in engine.step():
            said[delta.request].extend(delta.tokens)
            preemptions += delta.statistics.preemptions
        engine.check()
    assert not engine.has_work
    assert engine.status.blocks_owned == 0
    assert preemptions or not preempting
    return said


def compare(asked: list[Request], said: dict[str, list[int]], alone: Mapping[str, list[int]], aborts: Any) -> None:
    exact = [request for request in asked if request.speculation.rule in EXACT]
    assert len(exact) > 40
    wrong = []
    for request in exact:
        told, twin = said[request.id], alone[request.id]
        whole = told == twin if request.id not in aborts else told == twin[: len(told)]
        if not whole:
            wrong.append((request, told, twin))
    assert not wrong, f"{len(wrong)} rows differ, first: {wrong[0]}"


def test_on_the_fake_model() -> None:
    setup = FakeSetup(vocab_size=12, num_blocks=80, max_sequences=48, knobs=Knobs(k=4, token_budget=120, adaptive=True))
    laws = HashedLaws(12, sharp=1.5)
    asked = rows(12, (None, "ngram", "liar", "oracle", "model"), 40, seed=5)
    roomy = FakeSetup(vocab_size=12, prefix=False, knobs=Knobs(k=0, adaptive=False))
    twins: dict[str, Answer] = {}
    for request in asked:
        twins |= run(fake_engine(roomy, laws), [replace(request, speculation=Speculation(enabled=False))])
    oracle = OracleProposer({request.prompt: twins[request.id].tokens for request in asked})
    drafters = [oracle, Liar(12), ngram(), draft_proposer(setup, laws)]
    aborts = {f"r{n}": n for n in range(3, ROWS, 13)}
    engine = fake_engine(setup, laws, drafters)
    said = batched(engine, asked, aborts, preempting=True)
    compare(asked, said, {name: list(twin.tokens) for name, twin in twins.items()}, aborts)


@pytest.mark.timeout(120)
def test_on_a_real_model(tiny_llama: Path) -> None:
    """A tiny Llama in float32, its own first layer as the draft model, blocks short enough to preempt."""
    config: dict[str, Any] = {
        "target": {"model": str(tiny_llama), "dtype": "float32"},
        "drafts": [
            {"kind": "ngram", "min_match": 1},
            {"kind": "suffix"},
            {"kind": "model", "layers": [0]},
        ],
        "cache": {"blocks": 60, "block_tokens": 4},
        "scheduler": {"max_sequences": 48},
        "knobs": {"k": 4, "token_budget": 160},
    }
    assembly = assemble(parse(config))
    asked = rows(assembly.resolved.model.vocab_size, (None, "ngram", "suffix", "model"), 32, seed=6)
    plain = assemble(parse({**config, "drafts": [], "cache": {**config["cache"], "prefix": False}}))
    alone: dict[str, list[int]] = {}
    for request in asked:
        alone |= batched(plain.engine, [replace(request, speculation=Speculation(enabled=False))], {})
    aborts = {f"r{n}": n for n in range(3, ROWS, 13)}
    compare(asked, batched(assembly.engine, asked, aborts, preempting=True), alone, aborts)
