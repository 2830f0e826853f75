"""The configuration: what it refuses, how it says so, and that nothing is lost on the way."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config import (
    CacheConfig,
    Config,
    KnobConfig,
    ModelDraft,
    NgramDraft,
    parse,
    parse_bytes,
    parse_knobs,
)
from cluster.errors import ConfigError
from cluster.messages import Knobs


def refusal(raw: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    return str(caught.value).splitlines()


# What is accepted


def test_nothing_said_is_the_default() -> None:
    assert parse({}) == Config()


def test_knobs_of_the_step_carry_every_key() -> None:
    assert KnobConfig().knobs() == Knobs()
    assert set(KnobConfig.model_fields) | {"caps"} == set(Knobs.__dataclass_fields__)  # caps: control's, not a person's
    said = {"k": 3, "rule": "ratio", "token_budget": 99, "adaptive": False}
    assert parse({"knobs": said}).knobs.knobs() == Knobs(3, "ratio", 99, adaptive=False)


def test_yaml_lists_become_tuples() -> None:
    config = parse(yaml.safe_load("drafts: [{kind: model, layers: [0, 1, 29]}, {kind: ngram}]"))
    assert config.drafts == (ModelDraft(kind="model", layers=(0, 1, 29)), NgramDraft(kind="ngram"))


def test_no_drafts_is_a_choice() -> None:
    assert parse({"drafts": []}).drafts == ()


def test_frozen() -> None:
    config = parse({})
    with pytest.raises(ValidationError):
        config.knobs.k = 1  # type: ignore[misc]


# What is refused, and in which words


LAYER_PICKS = [
    ([3, 1], (3, 1)),
    ({"first": 2, "last": 1}, (0, 1, 9)),
    ({"last": 2}, (8, 9)),
    ({"every": 4}, (0, 4, 8)),
]


@pytest.mark.parametrize(("said", "kept"), LAYER_PICKS)
def test_layers_may_be_listed_or_counted(said: object, kept: tuple[int, ...]) -> None:
    draft = parse({"drafts": [{"kind": "model", "layers": said}]}).drafts[0]
    assert isinstance(draft, ModelDraft)
    assert draft.layers is not None
    assert draft.layers.of(10) == kept


def test_a_pick_that_leaves_nothing_out_is_refused() -> None:
    draft = parse({"drafts": [{"kind": "model", "layers": {"first": 2, "last": 2}}]}).drafts[0]
    assert isinstance(draft, ModelDraft)
    assert draft.layers is not None
    with pytest.raises(ConfigError, match="leave out none of 4"):
        draft.layers.of(4)


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"cach": {}}, "cach: unknown key; did you mean cache?"),
        ({"cache": {"block_token": 16}}, "cache.block_token: unknown key; did you mean block_tokens?"),
        (
            {"drafts": [{"kind": "ngram", "max_mach": 3}]},
            "drafts.0.max_mach: unknown key; did you mean max_match?",
        ),
        (
            {"drafts": [{"kind": "ngram"}, {"kind": "model", "layer": [0]}]},
            "drafts.1.layer: unknown key; did you mean layers?",
        ),
        ({"k": 3}, "k: unknown key; did you mean knobs.k?"),
        ({"knobs": {"max_sequences": 3}}, "knobs.max_sequences: unknown key; did you mean scheduler.max_sequences?"),
        (
            {"knobs": {"zzz": 3}},
            "knobs.zzz: unknown key; known here: k, rule, token_budget, adaptive, threshold, typical, max_retries",
        ),
        (
            {"drafts": [{"kind": "model", "max_match": 3}]},
            "drafts.0.max_match: unknown key; did you mean drafts[ngram].max_match?",
        ),
        (
            {"drafts": [{"kind": "ngrm"}]},
            "drafts.0.kind: unknown kind 'ngrm'; did you mean ngram? kinds: ngram, suffix, recycling, model",
        ),
        ({"drafts": [{"kind": "oracle"}]}, "drafts.0.kind: unknown kind 'oracle'; kinds: ngram, suffix, recycling,"),
        ({"drafts": [{}]}, "drafts.0.kind: missing; kinds: ngram, suffix, recycling, model"),
        ({"drafts": {"kind": "ngram"}}, "drafts: must be a list, not {'kind': 'ngram'}"),
        ({"drafts": ["ngram"]}, "drafts.0: must be a mapping of keys to values, not 'ngram'"),
        ({"drafts": [{"kind": "model", "layers": []}]}, "drafts.0.layers.keep: must not be empty"),
        ({"drafts": [{"kind": "model", "layers": [0, -1]}]}, "drafts.0.layers.keep.1: input should be greater than"),
        ({"target": 3}, "target: must be a mapping of keys to values, not 3"),
        ({"knobs": {"k": -1}}, "knobs.k: input should be greater than or equal to 0, not -1"),
        ({"knobs": {"k": True}}, "knobs.k: input should be a valid integer, not True"),
        ({"target": {"model": False}}, "target.model: input should be a valid string, not False"),
        ({"target": {"dtype": "fp32"}}, "target.dtype: input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
    ],
)
def test_refusal_names_path_and_remedy(raw: dict[str, Any], line: str) -> None:
    (only,) = refusal(raw)
    assert only.startswith(line)


def test_every_problem_is_listed() -> None:
    lines = refusal({"cach": {}, "knobs": {"k": 65, "ruel": "ratio"}, "drafts": [{"kind": "x"}]})
    assert sorted(line.split(":")[0] for line in lines) == ["cach", "drafts.0.kind", "knobs.k", "knobs.ruel"]


@pytest.mark.parametrize("raw", [None, [], "text", 7])
def test_not_a_mapping(raw: object) -> None:
    assert refusal(raw)[0].startswith("the configuration must be a mapping of keys to values")


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (
            {"drafts": [{"kind": "ngram", "min_match": 5, "max_match": 4}]},
            "drafts.0: min_match=5 must be at most max_match=4",
        ),
        ({"drafts": [{"kind": "model", "layers": {}}]}, "drafts.0.layers: layers must be a list, or say first"),
        ({"drafts": [{"kind": "model", "layers": {"every": 2, "last": 1}}]}, "drafts.0.layers: layers must be a list"),
        ({"drafts": [{"kind": "model", "layers": {"every": 1}}]}, "drafts.0.layers.every: input should be greater"),
        ({"drafts": [{"kind": "translated"}]}, "drafts.0.model: field required"),
        ({"drafts": [{"kind": "quantized", "bits": 2}]}, "drafts.0.bits: input should be 8 or 4"),
        ({"drafts": [{"kind": "model", "model": "d", "max_tokens": 16}]}, "drafts.0.max_tokens: input should be less"),
        ({"drafts": [{"kind": "model"}]}, "drafts.0: a draft made from the target needs layers"),
        ({"knobs": {"k": 16, "token_budget": 16}}, "knobs: k=16 must be below token_budget=16"),
    ],
)
def test_fields_that_contradict_each_other(raw: dict[str, Any], line: str) -> None:
    assert refusal(raw)[0].startswith(line)


def test_fields_that_just_agree() -> None:
    parse({"drafts": [{"kind": "ngram", "min_match": 4, "max_match": 4}], "knobs": {"k": 15, "token_budget": 16}})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["drafts", "kind", "cache", "memory", "knobs", "k", "zz"]) | st.integers(),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_nothing_but_config_errors_escapes(raw: object) -> None:
    with suppress(ConfigError):
        parse(raw)  # type: ignore[arg-type]


# Memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("64 b", 64),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("512MiB", 512 * 1024**2),
        ("1.5GB", 1_500_000_000),
        (" 1.5 gib ", 3 * 1024**3 // 2),
        ("1TiB", 1024**4),
        ("1TB", 1000**4),
    ],
)
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert CacheConfig(memory=text).memory_bytes == size


@pytest.mark.parametrize("text", ["", "lots", "0", "0.1", "-1GB", "1.5.2GB", "1 PB", "GiB", "1e9", "nan", "1,5GB"])
def test_bytes_refused(text: str) -> None:
    (line,) = refusal({"cache": {"memory": text}})
    assert line.startswith(f"cache.memory: {text!r} is no amount of memory")
    assert "512MiB" in line


def test_bytes_unquoted_in_yaml() -> None:
    assert parse(yaml.safe_load("cache: {memory: 536870912}")).cache.memory_bytes == 536870912


def test_auto_memory_is_for_the_builder_to_resolve() -> None:
    assert CacheConfig().memory_bytes is None


# Knobs that change while running


def test_user_config_changes_only_what_it_names() -> None:
    base = KnobConfig(k=3, rule="ratio")
    assert parse_knobs({"k": 7}, base) == KnobConfig(k=7, rule="ratio")
    assert parse_knobs(None, base) == base
    assert parse_knobs({}) == KnobConfig()


def test_user_config_is_checked_as_strictly() -> None:
    with pytest.raises(ConfigError, match="ruel: unknown key; did you mean rule"):
        parse_knobs({"ruel": "ratio"})
    with pytest.raises(ConfigError, match="k=20 must be below token_budget=16"):
        parse_knobs({"token_budget": 16}, KnobConfig(k=20))
    with pytest.raises(ConfigError, match="must be a mapping"):
        parse_knobs([1])  # type: ignore[arg-type]
