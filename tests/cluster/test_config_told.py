"""The configuration told again: nothing is lost on the way, and every key is named with what it means."""

from __future__ import annotations

import json

import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from cluster.config import (
    CacheConfig,
    Config,
    KnobConfig,
    ModelDraft,
    NgramDraft,
    SchedulerConfig,
    ServingConfig,
    SuffixDraft,
    TargetConfig,
    describe,
    parse,
    reference,
)

MODEL = st.text(min_size=1, max_size=8)
DTYPE = st.sampled_from(["auto", "float32", "bfloat16", "float16"])
MAYBE = st.none() | st.integers(16, 10**6)
NGRAM = st.builds(NgramDraft, kind=st.just("ngram"), max_match=st.integers(4, 16), min_match=st.integers(1, 4))
LAYERS = st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple)
MODEL_DRAFT = st.builds(ModelDraft, kind=st.just("model"), model=MODEL.map("d".__add__), layers=LAYERS, dtype=DTYPE)
SUFFIX = st.builds(
    SuffixDraft,
    kind=st.just("suffix"),
    max_depth=st.integers(2, 200),
    factor=st.floats(0.1, 64.0),
    min_prob=st.floats(0.0, 1.0),
    past_requests=st.integers(1, 10**6),
)
CONFIGS = st.builds(
    Config,
    target=st.builds(TargetConfig, model=MODEL, tokenizer=st.none() | MODEL, dtype=DTYPE, max_context=MAYBE),
    drafts=st.lists(NGRAM | SUFFIX | MODEL_DRAFT, max_size=3).map(tuple),
    cache=st.builds(
        CacheConfig,
        block_tokens=st.integers(1, 256),
        memory=st.sampled_from(["auto", "512MiB", "1.5GB", "7"]),
        blocks=MAYBE,
        prefix=st.booleans(),
    ),
    scheduler=st.builds(SchedulerConfig, max_sequences=st.integers(1, 4096), max_waiting=st.integers(0, 99)),
    knobs=st.builds(
        KnobConfig,
        k=st.integers(0, 64),
        rule=st.sampled_from(["coupled", "ratio"]),
        token_budget=st.integers(65, 9999),
    ),
    serving=st.builds(ServingConfig, name=st.none() | MODEL, max_tokens=st.integers(1, 9999)),
)


@given(CONFIGS)
def test_round_trip(config: Config) -> None:
    assert parse(config.model_dump()) == config
    assert parse(json.loads(config.model_dump_json())) == config
    assert parse(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


@given(CONFIGS)
def test_description_has_one_line_a_value(config: Config) -> None:
    lines = describe(config)
    paths = [line.split(" = ")[0] for line in lines]
    assert len(paths) == len(set(paths))
    assert f"knobs.k = {config.knobs.k}  (set)" in lines
    for index, draft in enumerate(config.drafts):
        assert any(line.startswith(f"drafts.{index}.kind = {draft.kind}") for line in lines)


def test_description_tells_what_a_person_set_and_what_follows() -> None:
    lines = describe(parse({"cache": {"memory": "1KiB", "prefix": False}, "drafts": []}))
    assert "cache.memory = 1KiB  (set)" in lines
    assert "cache.memory_bytes = 1024  (derived)" in lines
    assert "cache.prefix = false  (set)" in lines
    assert "cache.block_tokens = 32" in lines
    assert "drafts = []  (set)" in lines
    assert "target.max_context = null" in lines


def keys_of(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def test_reference_names_every_key_once_and_says_what_it_means() -> None:
    rows = [line.strip("| ").split(" | ") for line in reference()[2:]]
    paths = [row[0].strip("`") for row in rows]
    assert len(paths) == len(set(paths))
    assert all(len(row) == 3 and len(row[2]) > 4 for row in rows)
    last = {path.rpartition(".")[2] for path in paths}
    for model in (
        TargetConfig,
        NgramDraft,
        SuffixDraft,
        ModelDraft,
        CacheConfig,
        SchedulerConfig,
        KnobConfig,
        ServingConfig,
    ):
        assert keys_of(model) - {"typical", "drafter"} <= last  # parts of their own, listed key by key
    assert "drafts[ngram].max_match" in paths
