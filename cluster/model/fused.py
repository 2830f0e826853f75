"""A decoder of the Llama pattern, run as one kernel call a step instead of transformers' modules.

Knows: the order of the kernels of a step and the buffers between them.
Refuses to know: plans; which models qualify (pattern.py) and what is right (probe.py).

The original weights of a layer are released as soon as its packed form has passed the probe, so
that memory peaks one layer above the model.

Legend of shape suffixes: T tokens of the step, N positions that want logits, E hidden width,
K rotary width, V vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from cluster.kernels.library import Layer, Library, Step
from cluster.kv.store import Arena
from cluster.model.attention.base import Ragged, Variant
from cluster.model.attention.cpu import describe
from cluster.model.packed import round_up
from cluster.model.pattern import FusedLayer, pack_head, pack_layer, release
from cluster.model.probe import Probe

_FEWEST_ROWS = 64  # buffers are not grown for every step of a young batch


class _Buffers:
    """Where a step's rows live between kernels. Columns beyond a width stay zero: weights there are zero too."""

    def __init__(self, tokens: int, hidden: int, layer: Layer, dtype: torch.dtype) -> None:
        self.tokens = round_up(max(tokens, _FEWEST_ROWS), 16)
        self.stream_TE = torch.zeros(self.tokens, hidden)
        self.normed = torch.zeros(self.tokens, layer.qkv.depth, dtype=dtype)
        self.projected = torch.zeros(self.tokens, layer.qkv.columns)
        self.attended = torch.zeros(self.tokens, layer.out.depth, dtype=dtype)
        self.active = torch.zeros(self.tokens, layer.down.depth, dtype=dtype)
        # A byte a level, and a scale and a sum of four bytes each for a group of 32.
        deepest = max(linear.depth for linear in (layer.qkv, layer.out, layer.down))
        self.levels = torch.empty(self.tokens * deepest * 5 // 4 if layer.qkv.bits else 0, dtype=torch.uint8)


class FusedDecoder:
    """A causal language model that `follows_pattern`, over packed weights.

    Takes the weights out of `module`, which cannot be run afterwards.
    Raises ModelUnsupported when a packed layer does not compute what the modelling code computes.
    """

    def __init__(self, module: Any, library: Library) -> None:
        self._dtype: torch.dtype = module.dtype
        self._step = library.entry("step", self._dtype)
        self._embedding: torch.Tensor = module.model.embed_tokens.weight
        self._rotary: nn.Module = module.model.rotary_emb
        self._norm = module.model.norm.weight.detach().float().contiguous()
        self._epsilon = float(module.model.norm.variance_epsilon)
        self._buffers: _Buffers | None = None
        with torch.inference_mode():
            layers = self._take_layers(module.model, library)
            self._lm_head = pack_head(module, library)
        self._keep = layers
        self._group = layers[0].group
        self._layers = (Layer * len(layers))(*(layer.view for layer in layers))

    def run(
        self, arena: Arena, tokens_T: npt.NDArray[np.int64], ragged: Ragged, wanted_N: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Compute a step; float32 logits [N, V] of the wanted positions."""
        buffers = self._room(len(tokens_T), self._layers[0])
        logits_NV = torch.empty(len(wanted_N), self._lm_head.columns)
        cosines_TK, sines_TK = self._rotation(ragged)
        step = _describe(arena, ragged, self._group, buffers, cosines_TK, sines_TK)
        step.layers, step.num_layers = ctypes.addressof(self._layers), len(self._layers)
        step.embedding, step.tokens = self._embedding.data_ptr(), tokens_T.ctypes.data
        step.head, step.norm, step.epsilon = self._lm_head.view, self._norm.data_ptr(), self._epsilon
        step.wanted, step.num_wanted, step.logits = wanted_N.ctypes.data, len(wanted_N), logits_NV.data_ptr()
        self._step(torch.get_num_threads(), ctypes.addressof(step))
        return logits_NV

    def _rotation(self, ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.from_numpy(ragged.positions_T)[None]
        cosines, sines = self._rotary(self._norm, positions)  # the first argument gives only dtype and device
        return cosines[0].contiguous(), sines[0].contiguous()

    def _room(self, tokens: int, layer: Layer) -> _Buffers:
        if self._buffers is None or self._buffers.tokens < tokens:
            self._buffers = _Buffers(tokens, self._embedding.shape[1], layer, self._dtype)
        return self._buffers

    def _take_layers(self, decoder: Any, library: Library) -> list[FusedLayer]:
        """Pack, probe and release one layer after the other."""
        first = decoder.layers[0].self_attn
        probe = Probe(decoder, first.k_proj.out_features // first.head_dim, first.head_dim)
        layers = []
        for index, module in enumerate(decoder.layers):
            answer = probe.ask(module)
            layers.append(pack_layer(module, answer.variant, library))
            levels = bool(layers[-1].view.qkv.bits)
            probe.compare(answer, self._rerun(layers[-1], probe), f"layer {index}", levels=levels)
            release(module)
        return layers

    def _rerun(self, layer: FusedLayer, probe: Probe) -> torch.Tensor:
        """The probe through one packed layer, without embedding or head."""
        num = probe.ragged.num_tokens
        buffers = self._room(num, layer.view)
        buffers.stream_TE[:num] = probe.stream_TE
        arena = probe.arena(self._dtype)
        cosines_TK, sines_TK = self._rotation(probe.ragged)
        step = _describe(arena, probe.ragged, layer.group, buffers, cosines_TK, sines_TK)
        step.layers, step.num_layers = ctypes.addressof(layer.view), 1
        self._step(torch.get_num_threads(), ctypes.addressof(step))
        return buffers.stream_TE[:num]


def _describe(
    arena: Arena,
    ragged: Ragged,
    group: int,
    buffers: _Buffers,
    cosines_TK: torch.Tensor,
    sines_TK: torch.Tensor,
) -> Step:
    """What every step tells the kernels; the caller keeps the tensors alive and adds layers, input and head."""
    return Step(
        layer_bytes=arena.layer_bytes,
        paged=describe(arena, 0, ragged, group, Variant(scaling=0.0)),
        slots=ragged.slots_T.ctypes.data,
        cosines=cosines_TK.data_ptr(),
        sines=sines_TK.data_ptr(),
        rotary=cosines_TK.shape[-1],
        hidden=buffers.stream_TE.shape[1],
        num_tokens=ragged.num_tokens,
        stream=buffers.stream_TE.data_ptr(),
        normed=buffers.normed.data_ptr(),
        attended=buffers.attended.data_ptr(),
        active=buffers.active.data_ptr(),
        levels=buffers.levels.data_ptr(),
        projected=buffers.projected.data_ptr(),
    )
