"""Checks a packed layer against the modelling code it replaces, on a small random step.

Knows: how to run one transformers decoder layer alone, in float32, over a small arena of noise.
Refuses to know: how the packed layer computes.

What the layer asks of attention (scaling, window, ...) is read off its own call, so that it cannot
be misread from a configuration.

Legend of shape suffixes: T tokens of the step, E hidden width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cluster.errors import ModelUnsupported
from cluster.kv.store import Arena
from cluster.messages import PlanRow
from cluster.model.attention.base import Ragged, Variant
from cluster.model.attention.bridge import PagedCache
from cluster.model.attention.plain import PlainBackend

#: Largest error of a packed layer relative to what the layer adds to its input, by norm over a token. In bfloat16
#: rounding alone makes 3.0e-2 in the first layer of Qwen2.5-Coder-0.5B (3.8e-2 in the modelling code's own bfloat16).
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
#: Where rows are rounded to 8 bits in groups of 32 before each product; outliers make a group coarse.
_LEVEL_TOLERANCE = 0.2

_BLOCKS, _BLOCK_TOKENS = 4, 16
#: A row in the middle of a sequence whose blocks are out of order, and one at its start.
_ROWS = (
    PlanRow(sequence=0, first=27, tokens=(0,) * 9, blocks=(3, 0, 2)),
    PlanRow(sequence=1, first=0, tokens=(0,) * 2, blocks=(1,)),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the modelling code made of the probe, float32 [T, E], and the attention it asked for."""

    expected_TE: torch.Tensor
    variant: Variant


class _Recorder(PlainBackend):
    """The plain backend on layer 0 of a small arena; remembers what it was asked for."""

    variant: Variant | None = None

    def write(
        self,
        arena: Arena,
        layer: int,  # noqa: ARG002 - the arena has one layer
        ragged: Ragged,
        keys_THD: torch.Tensor,
        values_THD: torch.Tensor,
    ) -> None:
        super().write(arena, 0, ragged, keys_THD, values_THD)

    def attend(
        self,
        arena: Arena,
        layer: int,  # noqa: ARG002 - the arena has one layer
        ragged: Ragged,
        queries_TQD: torch.Tensor,
        variant: Variant,
    ) -> torch.Tensor:
        self.variant = variant
        return super().attend(arena, 0, ragged, queries_TQD, variant)


class Probe:
    """One random step, the same for every layer of a model whose attention is `bridge.IMPLEMENTATION`."""

    def __init__(self, decoder: Any, heads: int, dim: int) -> None:
        self.ragged = Ragged.of(_ROWS, block_tokens=_BLOCK_TOKENS, num_blocks=_BLOCKS)
        self._rotary = decoder.rotary_emb
        self._dtype: torch.dtype = decoder.dtype
        self._heads, self._dim = heads, dim
        generator = torch.Generator().manual_seed(0)
        table: torch.Tensor = decoder.embed_tokens.weight
        tokens_T = torch.randint(0, len(table), (self.ragged.num_tokens,), generator=generator)
        self.stream_TE = nn.functional.embedding(tokens_T, table).float()
        noise = torch.randn(_BLOCKS * _BLOCK_TOKENS * 2 * heads * dim, generator=generator)
        self._noise = noise.to(self._dtype)  # values both number formats hold

    def arena(self, dtype: torch.dtype) -> Arena:
        """One layer of the same noise in either number format."""
        arena = Arena(
            _BLOCKS,
            num_layers=1,
            num_kv_heads=self._heads,
            head_dim=self._dim,
            dtype=dtype,
            block_tokens=_BLOCK_TOKENS,
        )
        for block in range(_BLOCKS):
            arena.block(block).view(dtype).copy_(self._noise.view(_BLOCKS, -1)[block])
        return arena

    def ask(self, layer: nn.Module) -> Answer:
        """Run a layer of the modelling code on the probe, in float32."""
        exact = layer if self._dtype == torch.float32 else copy.deepcopy(layer).float()
        recorder = _Recorder()
        positions = torch.from_numpy(self.ragged.positions_T)[None]
        output = exact(
            self.stream_TE[None],
            attention_mask=None,
            position_embeddings=self._rotary(self.stream_TE, positions),
            position_ids=positions,
            cache=PagedCache(self.arena(torch.float32), recorder, self.ragged),
            use_cache=False,
        )
        if recorder.variant is None:
            raise ModelUnsupported(f"{type(layer).__name__} did not reach paged attention")
        return Answer(output[0], recorder.variant)

    def compare(self, answer: Answer, got_TE: torch.Tensor, name: str, *, levels: bool = False) -> None:
        """`levels`: the layer's weights are in few bits, so the kernels round what they multiply too.

        Raises ModelUnsupported unless `got_TE` is the answer within rounding; then it becomes the next probe."""
        # An all-zero embedding, as a padding token has, may get nothing added: no error then, not 0/0.
        added = (answer.expected_TE - self.stream_TE).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        error = float(((got_TE - answer.expected_TE).norm(dim=-1) / added).max())
        if not error <= (_LEVEL_TOLERANCE if levels else _TOLERANCE[self._dtype]):
            raise ModelUnsupported(
                f"{name}: the fused kernels are off by {error:.1e} of what the modelling code computes; "
                "set OUTRIDER_NO_COMPILER=1 to run this model without them"
            )
        self.stream_TE = answer.expected_TE
