"""A batch of 64 in which no two rows ask for the same: each says what it says alone."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from cluster.build import assemble
from cluster.config import parse
from cluster.config_drafts import DraftConfig
from cluster.engine import Engine
from cluster.messages import Knobs
from cluster.request import Request, Sampling, Speculation
from tests.fakes import Answer, FakeSetup, fake_engine, run
from tests.laws.everything import METHODS
from tests.laws.schedules import LAWS, OTHER_LAWS, VOCAB
from tests.proposers import KINDS, Around
from tests.tiny import make_tiny, make_tiny_seq2seq

ROWS = 64
EXACT = ("coupled", "ratio", "block")
LOSSY = ("threshold", "typical")


def rows(vocab: int, methods: tuple[str | None, ...], longest: int, seed: int) -> list[Request]:
    """Every rule, method, k and penalty somewhere.

    Under ratio and block a greedy row says the same each time; a warm one, of which there are some, has
    only its law in common with its solo run, and its word to keep.
    """
    chance = random.Random(seed)
    asked = []
    for n in range(ROWS):
        rule = (*EXACT, "coupled", *LOSSY)[n % 6]
        sampling = Sampling(
            max_tokens=chance.randint(1, longest),
            temperature=chance.choice((0.0, 0.7, 1.5)) if rule == "coupled" or n % 12 == 1 else 0.0,
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
            bad_words=("ab", " the") if n % 8 == 0 else (),
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
    engine: Engine, asked: list[Request], aborts: Mapping[str, int], drafting: Collection[str] = ()
) -> dict[str, list[int]]:
    """Tokens by request; aborts: step at which a request is dropped.

    drafting: whose drafts must have been verified; then one row at least must have given way, too.
    """
    preemptions = 0
    sources: set[str] = set()
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
            sources |= {count.source for count in delta.statistics.by_source}
        engine.check()
    assert not engine.has_work
    assert engine.status.blocks_owned == 0
    assert sources >= set(drafting)
    assert preemptions or not drafting
    return said


def compare(asked: list[Request], said: dict[str, list[int]], alone: Mapping[str, list[int]], aborts: Any) -> None:
    exact = [
        request
        for request in asked
        if request.speculation.rule == "coupled" or (request.speculation.rule in EXACT and request.sampling.greedy)
    ]
    assert len(exact) > 35
    wrong = []
    for request in exact:
        told, twin = said[request.id], alone[request.id]
        whole = told == twin if request.id not in aborts else told == twin[: len(told)]
        if not whole:
            wrong.append((request, told, twin))
    assert not wrong, f"{len(wrong)} rows differ, first: {wrong[0]}"


#: One of each name, so that a request can ask for any of them.
FAKES = (
    "ngram",
    "suffix",
    "recycling",
    "model, near",
    "quantized",
    "seq2seq",
    "translated",
    "oracle",
    "liar",
    "sampled",
)


def test_on_the_fake_model() -> None:
    setup = FakeSetup(VOCAB, num_blocks=50, max_sequences=48, knobs=Knobs(k=4, token_budget=120, adaptive=True))
    asked = rows(VOCAB, (None, *(METHODS[kind] for kind in FAKES)), 40, seed=5)
    roomy = FakeSetup(VOCAB, prefix=False, knobs=Knobs(k=0, adaptive=False))
    twins: dict[str, Answer] = {}
    for request in asked:
        plain = replace(request, speculation=Speculation(enabled=False))
        twins |= run(fake_engine(roomy, LAWS, text=True), [plain])
    around = Around(setup, LAWS, OTHER_LAWS, {request.prompt: twins[request.id].tokens for request in asked})
    aborts = {f"r{n}": n for n in range(3, ROWS, 13)}
    engine = fake_engine(setup, LAWS, [KINDS[kind](around) for kind in FAKES], text=True)
    said = batched(engine, asked, aborts, drafting=[METHODS[kind] for kind in FAKES])
    compare(asked, said, {name: list(twin.tokens) for name, twin in twins.items()}, aborts)
    for request in asked:
        if request.sampling.thinking_tokens is None:
            assert all(token not in said[request.id] for bad in request.sampling.bad_ids for token in bad)


@pytest.mark.timeout(400)
def test_on_a_real_model(tiny_llama: Path, tmp_path: Path) -> None:
    """A tiny Llama in float32 with every kind of draft there is, blocks short enough to preempt."""
    other, encoder = make_tiny(tmp_path / "other", words=True), make_tiny_seq2seq(tmp_path / "encoder")
    config: dict[str, Any] = {
        "target": {"model": str(tiny_llama), "dtype": "float32"},
        "drafts": [
            {"kind": "ngram", "min_match": 1},
            {"kind": "suffix"},
            {"kind": "recycling"},
            {"kind": "model", "layers": [0]},
            {"kind": "quantized", "bits": 8},
            {"kind": "seq2seq", "model": str(encoder)},
            {"kind": "translated", "model": str(other)},
        ],
        "cache": {"blocks": 60, "block_tokens": 4},
        "scheduler": {"max_sequences": 48},
        "knobs": {"k": 4, "token_budget": 160},
    }
    assembly = assemble(parse(config))
    kinds = assembly.resolved.drafts
    assert len(kinds) == len(get_args(get_args(DraftConfig)[0]))
    asked = rows(assembly.resolved.model.vocab_size, (None, *kinds), 32, seed=6)
    plain = assemble(parse({**config, "drafts": [], "cache": {**config["cache"], "prefix": False}}))
    alone: dict[str, list[int]] = {}
    for request in asked:
        alone |= batched(plain.engine, [replace(request, speculation=Speculation(enabled=False))], {})
    aborts = {f"r{n}": n for n in range(3, ROWS, 13)}
    said = batched(
        assembly.engine, asked, aborts, drafting=set(kinds) - {"translated"}
    )  # which offers whole words only
    compare(asked, said, alone, aborts)
