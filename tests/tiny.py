"""Tiny random models on disk, with a tokenizer and chat template, in the layout of the real ones.

Knows: enough of each family's configuration to make its attention do what makes the family special
(windows that are shorter than a test's prompt, soft caps, experts) at a size that runs in
milliseconds.
Refuses to know: how the engine loads or runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from cluster.model.quiet import quiet_transformers

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MERGES = (
    ("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("o", "n"), ("r", "e"), ("e", "s"), ("o", "r"),
    ("in", "g"), ("a", "t"), ("Ġ", "the"), ("Ġ", "a"), ("Ġ", "s"), ("d", "e"), ("de", "f"), ("Ġ", "Ġ"),
    ("r", "n"), ("re", "t"), ("ret", "u"), ("retu", "rn"), ("Ġ", "w"), ("Ġw", "or"), ("l", "d"), ("l", "l"),
    ("e", "ll"), ("Ġ", "on"), ("s", "t"), ("an", "d"), ("Ġ", "and"), ("ð", "Ł"), ("ä", "½"),
)  # fmt: skip

_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

#: What differs from the common configuration. Windows of 8 tokens, so that a test's prompt exceeds them.
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": _MIXED},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "layer_types": _MIXED},
}
FAMILIES = tuple(_FAMILIES)


def make_tiny(directory: Path, family: str = "llama", *, seed: int = 0, words: bool = False, **overrides: Any) -> Path:
    """Save a random model of `family` and its tokenizer in `directory`; the same seed, the same bytes.

    words: with the tokenizer of `make_word_tokenizer`.
    3 layers, width 64, 4 query and 2 key heads of 16, float32; `overrides` are configuration values.
    """
    tokenizer = make_word_tokenizer() if words else _tokenizer()
    end = tokenizer.convert_tokens_to_ids(IM_END)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        # Wide enough that the likeliest token leads clearly: equal-token tests must not hang on ties.
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.convert_tokens_to_ids(IM_START),
        "eos_token_id": end,
        "pad_token_id": end,
    }
    config = AutoConfig.for_model(family, **{**settings, **_FAMILIES[family], **overrides})
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text has ids, and characters outside ASCII are split over tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in _MERGES]
    return _byte_level(pieces, _MERGES)


def _byte_level(pieces: list[str], merges: Sequence[tuple[str, str]]) -> PreTrainedTokenizerFast:
    bpe = models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=list(merges))
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (ENDOFTEXT, IM_START, IM_END)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=IM_START, eos_token=IM_END, unk_token=ENDOFTEXT, pad_token=IM_END
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_seq2seq(directory: Path, *, words: bool = False, seed: int = 0) -> Path:
    """Save a random T5 in `directory`, 2 layers a side, float32; words: as for `make_tiny`."""
    tokenizer = make_word_tokenizer() if words else _tokenizer()
    end = tokenizer.convert_tokens_to_ids(IM_END)
    config = AutoConfig.for_model(
        "t5",
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        initializer_factor=5.0,
        tie_word_embeddings=False,
        decoder_start_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        dropout_rate=0.0,
    )
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_word_tokenizer() -> PreTrainedTokenizerFast:
    """Another way to cut the same texts: byte-level too, other ids, some words whole and others not merged at all."""
    merges = (
        ("c", "a"), ("ca", "t"), ("Ġ", "cat"), ("o", "g"), ("d", "og"), ("Ġ", "dog"), ("h", "e"), ("t", "he"),
        ("Ġ", "the"), ("n", "d"), ("a", "nd"), ("Ġ", "o"),
    )  # fmt: skip
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True) + ["".join(pair) for pair in merges]
    return _byte_level(pieces, merges)
