"""Which architectures the engine can run, and why it refuses the others.

Knows: what our paged attention needs of a decoder: softmax attention over plain keys and values,
in layers at `model.layers`, each with one `self_attn` that projects q, k and v.
Refuses to know: weights, devices, and anything about one particular model family beyond the
configuration words that give a family away.

Two nets. `refuse_config` reads the configuration and names what is not supported. `refuse_module`
looks at the built module and lets pass only what has the expected shape, so an architecture nobody
thought of is refused rather than run wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cluster.errors import ModelUnsupported

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})

#: Configuration words with a value that is neither None nor 0 or empty, and what they mean.
_FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        "kv_lora_rank": "multi-head latent attention (MLA)",
        "q_lora_rank": "multi-head latent attention (MLA)",
        "ssm_cfg": "a recurrent state",
        "ssm_state_size": "a recurrent state",
        "state_size": "a recurrent state",
        "mamba_d_state": "a recurrent state",
        "lru_width": "a recurrent state",
        "conv_L_cache": "a convolution state",
        "linear_num_key_heads": "linear attention",
        "linear_conv_kernel_dim": "linear attention",
        "rwkv_hidden_size": "a recurrent state",
        "attention_chunk_size": "chunked attention",
        "num_kv_shared_layers": "keys and values shared between layers",
        "cross_attention_layers": "cross-attention",
        "quantization_config": "quantized weights; dequantize it to safetensors in float32, bfloat16 or float16 first",
    }
)
_RECURRENT_FAMILIES = ("mamba", "rwkv", "recurrent", "jamba", "bamba", "zamba", "xlstm", "hyena", "retnet")


def refuse_config(config: PretrainedConfig, name: str) -> None:
    """Raises ModelUnsupported, with the reason, for a configuration the engine cannot run."""
    kind = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(name, kind, "an encoder-decoder; the engine runs decoders only")
    if any(family in kind for family in _RECURRENT_FAMILIES):
        raise _unsupported(name, kind, "uses a recurrent state; only softmax attention is implemented")
    for key, meaning in _FOREIGN.items():
        if getattr(config, key, None):
            raise _unsupported(name, kind, f"uses {meaning} ({key} in config.json)")
    for key in ("layer_types", "block_types", "layers_block_type"):
        foreign = sorted(set(getattr(config, key, None) or ()) - _LAYER_TYPES)
        if foreign:
            raise _unsupported(name, kind, f"has layers of type {', '.join(foreign)} ({key} in config.json)")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    declared = getattr(config, "architectures", None)
    if causal is None or (declared and causal not in declared):
        shown = ", ".join(declared) if declared else kind
        raise _unsupported(name, kind, f"{shown} is not a causal language model with text alone")


def refuse_module(module: nn.Module, name: str, kind: str) -> None:
    """Raises ModelUnsupported unless every decoder layer has the shape our attention expects."""
    decoder = getattr(module, "model", None)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise _unsupported(name, kind, "keeps its decoder layers elsewhere than at model.layers")
    if not getattr(module, "_supports_attention_backend", False):
        raise _unsupported(name, kind, "does not let its attention be replaced")
    for index, layer in enumerate(layers):
        attention = getattr(layer, "self_attn", None)
        split = all(hasattr(attention, part) for part in ("q_proj", "k_proj", "v_proj"))
        if attention is None or not (split or hasattr(attention, "qkv_proj")):
            raise _unsupported(name, kind, f"layer {index} has no self_attn with q, k and v projections")
        if getattr(attention, "layer_idx", None) != index:
            raise _unsupported(name, kind, f"layer {index} does not say which layer of the cache is its own")


def _unsupported(name: str, kind: str, reason: str) -> ModelUnsupported:
    return ModelUnsupported(f"{name} (model_type {kind}): {reason}")
