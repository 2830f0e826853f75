"""The layer pattern the fused kernels compute, and how a module of that pattern becomes their input.

Knows: pre-norm attention with rotary positions, optional biases and per-head norms, and a gated
SiLU feed forward; what of a module goes where in kernels/kernels.cpp.
Refuses to know: how layers are run (fused.py) and whether the result is right (probe.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cluster.kernels.library import Layer, Library
from cluster.model.attention.base import Variant
from cluster.model.packed import PackedLinear, pack_interleaved, pack_side_by_side

#: model_type of the families whose embedding, order of layers, final norm and head follow it too.
_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

_WIDEST_HEAD, _MOST_GROUP = 256, 32  # WIDEST and TILE in kernels/attention.h


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A layer as the kernels take it; `keep` holds the memory `view` points into."""

    view: Layer
    group: int  # query heads a kv head
    keep: tuple[object, ...]


def follows_pattern(module: Any) -> bool:
    """True when a causal language model, on a CPU, looks as the kernels expect; probe.py has the last word."""
    if module.config.model_type not in _FAMILIES or not Library.supports(module.dtype, module.device):
        return False
    return all(_layer_follows(layer) for layer in module.model.layers)


def _layer_follows(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    linears = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    group = attention.q_proj.out_features // attention.k_proj.out_features
    silu = type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    return silu and group <= _MOST_GROUP and attention.head_dim <= _WIDEST_HEAD


def pack_layer(layer: Any, variant: Variant, library: Library) -> FusedLayer:
    """Pack a layer's weights; the layer itself is left as it was."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = pack_side_by_side(library, [attention.q_proj, attention.k_proj, attention.v_proj])
    out = pack_side_by_side(library, [attention.o_proj])
    gate_up = pack_interleaved(library, mlp.gate_proj, mlp.up_proj)
    down = pack_side_by_side(library, [mlp.down_proj])
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    weights = [None if norm is None else norm.weight.detach().float().contiguous() for norm in norms]
    before, after, query, key = (None if weight is None else weight.data_ptr() for weight in weights)
    view = Layer(
        qkv=qkv.view,
        out=out.view,
        gate_up=gate_up.view,
        down=down.view,
        before=before,
        after=after,
        query_norm=query,
        key_norm=key,
        epsilon=layer.input_layernorm.variance_epsilon,
        scaling=variant.scaling,
        window=variant.window or 0,
    )
    group = attention.q_proj.out_features // attention.k_proj.out_features
    return FusedLayer(view, group, (qkv, out, gate_up, down, *weights))


def pack_head(module: Any, library: Library) -> PackedLinear:
    """Pack a model's head and release the original, unless the embedding shares it."""
    packed = pack_side_by_side(library, [module.lm_head])
    if module.lm_head.weight is not module.model.embed_tokens.weight:
        release(module.lm_head)
    return packed


def release(module: nn.Module) -> None:
    """Give back the memory of a module's parameters; it cannot be run afterwards."""
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
