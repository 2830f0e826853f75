"""A decoder of the Llama pattern, run as two kernels a layer instead of transformers' modules.

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

from cluster.kernels.library import Library, Place
from cluster.kv.store import Arena
from cluster.model.attention.base import Ragged
from cluster.model.attention.cpu import describe
from cluster.model.packed import round_up
from cluster.model.pattern import FusedLayer, pack_head, pack_layer, release
from cluster.model.probe import Probe

_FEWEST_ROWS = 64  # buffers are not grown for every step of a young batch


class _Buffers:
    """Where a step's rows live between kernels. Columns beyond a width stay zero: weights there are zero too."""

    def __init__(self, tokens: int, layer: FusedLayer, dtype: torch.dtype) -> None:
        self.tokens = round_up(max(tokens, _FEWEST_ROWS), 16)
        attention, feed_forward = layer.attention, layer.feed_forward
        self.stream_TE = torch.zeros(self.tokens, attention.hidden)
        self.normed = torch.zeros(self.tokens, attention.qkv.depth, dtype=dtype)
        self.projected = torch.zeros(self.tokens, attention.qkv.columns)
        self.attended = torch.zeros(self.tokens, attention.out.depth, dtype=dtype)
        self.active = torch.zeros(self.tokens, feed_forward.down.depth, dtype=dtype)


class _Rotation:
    """Rotary factors and slots of one step as the kernels take them."""

    def __init__(self, cosines_TK: torch.Tensor, sines_TK: torch.Tensor, ragged: Ragged) -> None:
        self._keep = (cosines_TK, sines_TK, ragged)
        self.view = Place(
            pages=None,
            slots=ragged.slots_T.ctypes.data,
            cosines=cosines_TK.data_ptr(),
            sines=sines_TK.data_ptr(),
            rotary=cosines_TK.shape[-1],
        )


class FusedDecoder:
    """A causal language model that `follows_pattern`, over packed weights.

    Takes the weights out of `module`, which cannot be run afterwards.
    Raises ModelUnsupported when a packed layer does not compute what the modelling code computes.
    """

    def __init__(self, module: Any, library: Library) -> None:
        self._dtype: torch.dtype = module.dtype
        self._attention_half = library.entry("attention_half", self._dtype)
        self._feed_forward_half = library.entry("feed_forward_half", self._dtype)
        self._head = library.entry("head", self._dtype)
        self._embedding: torch.Tensor = module.model.embed_tokens.weight
        self._rotary: nn.Module = module.model.rotary_emb
        self._norm = module.model.norm.weight.detach().float().contiguous()
        self._epsilon = float(module.model.norm.variance_epsilon)
        self._buffers: _Buffers | None = None
        self._layers: list[FusedLayer] = []
        with torch.inference_mode():
            self._take_layers(module.model, library)
        self._lm_head = pack_head(module, library)

    def run(
        self, arena: Arena, tokens_T: npt.NDArray[np.int64], ragged: Ragged, wanted_N: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Compute a step; float32 logits [N, V] of the wanted positions."""
        num = len(tokens_T)
        buffers = self._room(num)
        buffers.stream_TE[:num] = nn.functional.embedding(torch.from_numpy(tokens_T), self._embedding)
        rotation = self._rotation(ragged)
        for index, layer in enumerate(self._layers):
            self._run_layer(layer, arena, index, ragged, rotation, buffers)
        logits_NV = torch.empty(len(wanted_N), self._lm_head.columns)
        if len(wanted_N):
            self._run_head(buffers, wanted_N, logits_NV)
        return logits_NV

    def _run_layer(
        self,
        layer: FusedLayer,
        arena: Arena,
        index: int,
        ragged: Ragged,
        rotation: _Rotation,
        buffers: _Buffers,
    ) -> None:
        threads = torch.get_num_threads()
        paged = describe(arena, index, ragged, layer.attention.group, layer.variant)
        rotation.view.pages = paged.pages
        stream, normed = buffers.stream_TE.data_ptr(), buffers.normed.data_ptr()
        self._attention_half(
            threads,
            ctypes.addressof(layer.attention),
            ctypes.addressof(paged),
            ctypes.addressof(rotation.view),
            ragged.num_tokens,
            stream,
            normed,
            buffers.projected.data_ptr(),
            buffers.attended.data_ptr(),
        )
        self._feed_forward_half(
            threads, ctypes.addressof(layer.feed_forward), ragged.num_tokens, stream, normed, buffers.active.data_ptr()
        )

    def _run_head(self, buffers: _Buffers, wanted_N: npt.NDArray[np.int64], logits_NV: torch.Tensor) -> None:
        self._head(
            torch.get_num_threads(),
            ctypes.addressof(self._lm_head.view),
            self._norm.data_ptr(),
            self._epsilon,
            buffers.stream_TE.shape[1],
            buffers.stream_TE.data_ptr(),
            wanted_N.ctypes.data,
            len(wanted_N),
            buffers.normed.data_ptr(),
            logits_NV.data_ptr(),
        )

    def _rotation(self, ragged: Ragged) -> _Rotation:
        positions = torch.from_numpy(ragged.positions_T)[None]
        cosines, sines = self._rotary(self._norm, positions)  # the first argument gives only dtype and device
        return _Rotation(cosines[0].contiguous(), sines[0].contiguous(), ragged)

    def _room(self, tokens: int) -> _Buffers:
        if self._buffers is None or self._buffers.tokens < tokens:
            self._buffers = _Buffers(tokens, self._layers[0], self._dtype)
        return self._buffers

    def _take_layers(self, decoder: Any, library: Library) -> None:
        """Pack, probe and release one layer after the other."""
        first = decoder.layers[0].self_attn
        probe = Probe(decoder, first.k_proj.out_features // first.head_dim, first.head_dim)
        num = probe.ragged.num_tokens
        for index, module in enumerate(decoder.layers):
            answer = probe.ask(module)
            layer = pack_layer(module, answer.variant, library)
            self._layers.append(layer)
            buffers = self._room(num)
            buffers.stream_TE[:num] = probe.stream_TE
            arena = probe.arena(self._dtype)
            self._run_layer(layer, arena, 0, probe.ragged, self._rotation(probe.ragged), buffers)
            probe.compare(answer, buffers.stream_TE[:num], f"layer {index}")
            release(module)
