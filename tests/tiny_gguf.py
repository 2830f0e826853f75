"""Tiny random models as GGUF files, as packages carry the real ones."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, HEADS, KV_HEADS, LAYERS, INNER = 32, 2, 1, 2, 64


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """2 layers with a byte-level vocabulary and Q8_0 matrices; returns the dequantised tensors.

    architecture: "llama", or "qwen2" with its biases.
    """
    pieces = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))] + ["Ġ", "th", "the"]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = specials + pieces
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * len(pieces))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}")
    rng = np.random.default_rng(0)
    kv = WIDTH // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (len(tokens), WIDTH), "output.weight": (len(tokens), WIDTH)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (WIDTH, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH), "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{name}.weight"] = shape
    kept: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        packed = gguf.quantize(rng.standard_normal(shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        kept[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    biases = {"attn_q": WIDTH, "attn_k": kv, "attn_v": kv} if architecture == "qwen2" else {}
    for name, length in [(f"blk.{i}.{n}.bias", length) for i in range(LAYERS) for n, length in biases.items()]:
        kept[name] = rng.standard_normal(length).astype(np.float32)
        writer.add_tensor(name, kept[name])
    for name in ["output_norm.weight", *(f"blk.{i}.{n}_norm.weight" for i in range(LAYERS) for n in ("attn", "ffn"))]:
        kept[name] = rng.standard_normal(WIDTH).astype(np.float32)
        writer.add_tensor(name, kept[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept
