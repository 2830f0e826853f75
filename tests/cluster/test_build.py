"""Assembling an engine: real models in, clear errors out, the same tokens with any draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.build import Assembly, assemble
from cluster.config import (
    CacheConfig,
    DraftConfig,
    EngineConfig,
    KnobConfig,
    ModelDraft,
    NgramDraft,
    TargetConfig,
    parse,
)
from cluster.errors import CapacityError, ModelNotFound, PromptTooLong, TokenizerMismatch
from cluster.model.load import load_model, locate
from cluster.request import Request, Sampling
from tests.tiny import make_tiny, make_tiny_seq2seq

LAYERS = ModelDraft(kind="model", layers=(0, 2))
NGRAM = NgramDraft(kind="ngram", min_match=1)


def made(model: Path, *drafts: DraftConfig, **cache: object) -> Assembly:
    return assemble(
        EngineConfig(
            target=TargetConfig(model=str(model), dtype="float32"),
            drafts=drafts,
            cache=CacheConfig.model_validate({"blocks": 64, "block_tokens": 8, **cache}),
            knobs=KnobConfig(k=4, token_budget=32),
        )
    )


def answer(assembly: Assembly, temperature: float, tokens: int = 24) -> tuple[int, ...]:
    prompt = tuple(assembly.tokenizer.encode("the cat and the dog and the cat"))
    assembly.engine.submit(Request("r", prompt, Sampling(max_tokens=tokens, temperature=temperature, seed=3)))
    out: list[int] = []
    while assembly.engine.has_work:
        for delta in assembly.engine.step():
            out.extend(delta.tokens)
    return tuple(out)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(tiny_llama: Path, temperature: float) -> None:
    plain = answer(made(tiny_llama), temperature)
    for drafts in ((NGRAM,), (LAYERS,), (NGRAM, LAYERS)):
        assert answer(made(tiny_llama, *drafts), temperature) == plain


def test_greedy_is_what_transformers_generates(tiny_llama: Path) -> None:
    assembly = made(tiny_llama, NGRAM, LAYERS)
    module = load_model(locate(str(tiny_llama)), dtype=torch.float32, device=torch.device("cpu")).module
    ids = assembly.tokenizer.encode("the cat and the dog and the cat")
    out = module.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=sorted(assembly.tokenizer.eos_ids),
        pad_token_id=0,
    )
    assert answer(assembly, 0.0) == tuple(out[0, len(ids) :].tolist())


def test_what_auto_became_is_told(tiny_llama: Path) -> None:
    resolved = assemble(EngineConfig(target=TargetConfig(model=str(tiny_llama)))).resolved
    text = "\n".join(resolved.lines())
    for fact in (resolved.model.name, f"{resolved.blocks} blocks", "ngram"):
        assert fact in text
    assert resolved.threads >= 1


def test_prompt_longer_than_the_context(tiny_llama: Path) -> None:
    assembly = made(tiny_llama)
    with pytest.raises(PromptTooLong, match="shorten the prompt"):
        assembly.engine.submit(Request("r", (5,) * 10_000, Sampling()))
    assert not assembly.engine.has_work


def test_answer_is_cut_to_the_cache(tiny_llama: Path) -> None:
    """Two blocks of 8 hold 16 tokens: the answer ends when they are full."""
    assembly = made(tiny_llama, blocks=2)
    prompt = tuple(assembly.tokenizer.encode("a"))
    assembly.engine.submit(Request("r", prompt, Sampling(max_tokens=500, ignore_eos=True)))
    deltas = []
    while assembly.engine.has_work:
        deltas.extend(assembly.engine.step())
    assert deltas[-1].finish == "length"
    assert deltas[-1].statistics.output_tokens == 16 - len(prompt)


def test_no_model_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        made(tmp_path / "nothing")


def test_cache_larger_than_memory(tiny_llama: Path) -> None:
    with pytest.raises(CapacityError, match="lower cache"):
        made(tiny_llama, blocks=10**9)


def test_cache_smaller_than_two_blocks(tiny_llama: Path) -> None:
    with pytest.raises(CapacityError, match="at least 2"):
        made(tiny_llama, blocks=None, memory="1KiB")


def test_draft_of_another_vocabulary(tiny_llama: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other")
    renamed = json.loads((other / "tokenizer.json").read_text())
    renamed["model"]["vocab"]["eht"] = renamed["model"]["vocab"].pop("the")
    renamed["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(renamed))
    with pytest.raises(TokenizerMismatch, match="vocabularies"):
        made(tiny_llama, ModelDraft(kind="model", model=str(other)))


@pytest.mark.parametrize("padded", [320, 512])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_may_be_padded_otherwise(tiny_llama: Path, tmp_path: Path, padded: int, temperature: float) -> None:
    """One tokenizer, and more ids on one side: they are never drafted, and never fed to a model without them."""
    wide = make_tiny(tmp_path / "wide", vocab_size=padded)
    for target, draft in ((tiny_llama, wide), (wide, tiny_llama)):
        drafted = made(target, ModelDraft(kind="model", model=str(draft)))
        assert answer(drafted, temperature) == answer(made(target), temperature)


def test_draft_model_of_its_own(tiny_llama: Path, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """Another architecture over the same tokenizer is a fine draft."""
    draft = ModelDraft(kind="model", model=str(tiny_model("qwen2")))
    assert answer(made(tiny_llama, draft), 1.0) == answer(made(tiny_llama), 1.0)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafts with another tokenizer, and an encoder-decoder with the target's."""
    return {
        "words": make_tiny(tmp_path_factory.mktemp("words"), words=True),
        "t5": make_tiny_seq2seq(tmp_path_factory.mktemp("t5")),
        "t5 words": make_tiny_seq2seq(tmp_path_factory.mktemp("t5-words"), words=True),
    }


def every_kind(foreign: dict[str, Path]) -> dict[str, dict[str, object]]:
    return {
        "recycling": {"kind": "recycling"},
        "quantized 8": {"kind": "quantized"},
        "quantized 4": {"kind": "quantized", "bits": 4},
        "translated": {"kind": "translated", "model": str(foreign["words"])},
        "translated, sampling": {"kind": "translated", "model": str(foreign["words"]), "temperature": 1.0},
        "seq2seq": {"kind": "seq2seq", "model": str(foreign["t5"])},
        "seq2seq, translated": {"kind": "seq2seq", "model": str(foreign["t5 words"])},
        "layers by count": {"kind": "model", "layers": {"first": 1, "last": 1}},
        "model with its own ways": {
            "kind": "model",
            "layers": {"every": 2},
            "temperature": 1.4,
            "top_p": 0.92,
            "min_confidence": 0.1,
        },
    }


KINDS = tuple(every_kind(dict.fromkeys(("words", "t5", "t5 words"), Path())))


@pytest.mark.parametrize("name", KINDS)
def test_no_kind_of_draft_changes_a_token(tiny_llama: Path, foreign: dict[str, Path], name: str) -> None:
    draft = parse({"drafts": [every_kind(foreign)[name]]}).drafts[0]
    drafted, plain = made(tiny_llama, draft), made(tiny_llama)
    for temperature in (0.0, 1.0):
        assert answer(drafted, temperature) == answer(plain, temperature)
        drafted.engine.check()


def test_the_blend_of_every_kind_changes_no_token(tiny_llama: Path, foreign: dict[str, Path]) -> None:
    kinds = every_kind(foreign)
    drafts = parse({"drafts": [kinds[name] for name in ("recycling", "quantized 8", "translated", "seq2seq")]}).drafts
    config = EngineConfig(
        target=TargetConfig(model=str(tiny_llama), dtype="float32"),
        drafts=drafts,
        blend="expected",
        cache=CacheConfig(blocks=64, block_tokens=8),
        knobs=KnobConfig(k=4, token_budget=32),
    )
    blended = assemble(config)
    assert blended.resolved.drafts == ("recycling", "quantized", "translated", "seq2seq")
    for temperature in (0.0, 1.0):
        assert answer(blended, temperature) == answer(made(tiny_llama), temperature)


def test_the_quantized_copy_is_mostly_right(tiny_llama: Path) -> None:
    assembly = made(tiny_llama, parse({"drafts": [{"kind": "quantized"}]}).drafts[0])
    prompt = tuple(assembly.tokenizer.encode("the cat and the dog"))
    assembly.engine.submit(Request("r", prompt, Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)))
    deltas = []
    while assembly.engine.has_work:
        deltas.extend(assembly.engine.step())
    statistics = deltas[-1].statistics
    assert statistics.accepted > 0.5 * statistics.drafted > 0


def test_which_layers_are_kept_is_told(tiny_llama: Path) -> None:
    told: list[str] = []
    config = EngineConfig(
        target=TargetConfig(model=str(tiny_llama)),
        drafts=parse({"drafts": [{"kind": "model", "layers": {"first": 1, "last": 1}}]}).drafts,
        cache=CacheConfig(blocks=16),
    )
    assemble(config, told.append)
    assert any(line.endswith("layers 0, 2 of 3") for line in told)
