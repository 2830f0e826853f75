"""What the rest of the engine needs to know about a loaded model, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about one loaded model.

    fingerprint: hex digest of weights and config; part of every prefix block's key.
    """

    name: str
    architecture: str
    vocab_size: int
    max_context: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    device: str
    fingerprint: str
