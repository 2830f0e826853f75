"""Weights rearranged once for the kernels, and the buffers their rows are staged in.

Knows: how to pack one or several linear layers into the layouts of kernels/gemm.h and kernels/levels.h.
Refuses to know: which layers of a model those are, and how levels were chosen (quantize.py).

Legend of shape suffixes: N output columns, K input columns, G groups of K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from cluster.kernels.library import Library, Linear
from cluster.model.quantize import GROUP, Rounded, rounded_of

_PANEL = 32

#: Puts the rows of several weights, or their biases, into one order.
Join = Callable[[list[torch.Tensor]], torch.Tensor]


def round_up(size: int, to: int) -> int:
    return -(-size // to) * to


class PackedLinear:
    """One packed weight and what keeps it alive. `view` is what kernels take; `dtype` what they multiply it with.

    scales: with the bits of a level, for weights that are levels.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        bias_N: torch.Tensor | None,
        columns: int,
        depth: int,
        *,
        dtype: torch.dtype,
        scales: torch.Tensor | None = None,
        bits: int = 0,
    ) -> None:
        self._keep = (packed, bias_N, scales)
        self.columns = columns
        self.depth = depth
        self.dtype = dtype
        self.view = Linear(packed.data_ptr(), _address(bias_N), columns, depth, _address(scales), bits)

    @property
    def nbytes(self) -> int:
        """Of what a product reads."""
        packed, _, scales = self._keep
        return packed.nbytes + (0 if scales is None else scales.nbytes)


def pack_side_by_side(library: Library, linears: Sequence[nn.Linear]) -> PackedLinear:
    """Several weights over the same input as one: their columns one behind the other."""
    widths = [linear.out_features for linear in linears]
    levels = _levels(linears)
    if levels is not None:
        return _pack_levels(linears, levels, torch.cat, sum(widths))
    packed, depth = _blank(sum(widths), linears[0])
    at = 0
    for linear, width in zip(linears, widths, strict=True):
        # Shifting by `at` inside one group: group and stride beyond any row keep the order.
        _pack(library, linear, packed, group=1 << 40, stride=1 << 40, start=at)
        at += width
    return PackedLinear(packed, _bias(linears, torch.cat), sum(widths), depth, dtype=packed.dtype)


def pack_interleaved(library: Library, gate: nn.Linear, up: nn.Linear) -> PackedLinear:
    """Gate and up in alternating runs of 16 columns, so that one panel holds what multiplies each other."""
    width = round_up(gate.out_features, 16)

    def weave(parts: list[torch.Tensor]) -> torch.Tensor:
        padded = [_padded(part, width).view(width // 16, 16, *part.shape[1:]) for part in parts]
        return torch.stack(padded, dim=1).flatten(0, 2)

    levels = _levels([gate, up])
    if levels is not None:
        return _pack_levels([gate, up], levels, weave, 2 * width)
    packed, depth = _blank(2 * width, gate)
    _pack(library, gate, packed, group=16, stride=32, start=0)
    _pack(library, up, packed, group=16, stride=32, start=16)
    return PackedLinear(packed, _bias([gate, up], weave), 2 * width, depth, dtype=packed.dtype)


def _levels(linears: Sequence[nn.Linear]) -> list[Rounded] | None:
    """The levels of all, or None where the weights are whole."""
    found = [rounded for linear in linears if (rounded := rounded_of(linear)) is not None]
    return found if len(found) == len(linears) else None


def _pack_levels(linears: Sequence[nn.Linear], levels: list[Rounded], join: Join, columns: int) -> PackedLinear:
    width = round_up(columns, _PANEL)
    levels_NK = _padded(join([rounded.levels_NK for rounded in levels]), width)
    scales_NG = _padded(join([rounded.scale_NG for rounded in levels]), width)
    offsets_NG = _padded(join([rounded.offset_NG for rounded in levels]), width)
    depth, bits = levels_NK.shape[1], levels[0].bits
    # Columns by panel and half, k by group, half group, quad and place in it.
    packed = (levels_NK.to(torch.int16) + (128 if bits == 8 else 0)).to(torch.uint8)
    packed = packed.view(-1, 2, 16, depth // GROUP, 2, 4, 4).permute(0, 3, 1, 4, 5, 2, 6)
    if bits == 4:
        packed = packed[:, :, :, 0] | packed[:, :, :, 1] << 4
    scales = torch.stack([scales_NG, offsets_NG]).view(2, width // _PANEL, _PANEL, -1).permute(1, 3, 0, 2).contiguous()
    dtype = linears[0].weight.dtype
    return PackedLinear(
        packed.contiguous(), _bias(linears, join), columns, depth, dtype=dtype, scales=scales, bits=bits
    )


def _padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    """With rows of zeros behind."""
    return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _blank(columns: int, linear: nn.Linear) -> tuple[torch.Tensor, int]:
    depth = round_up(linear.in_features, 32)
    return torch.zeros(round_up(columns, _PANEL), depth, dtype=linear.weight.dtype), depth


def _pack(library: Library, linear: nn.Linear, packed: torch.Tensor, *, group: int, stride: int, start: int) -> None:
    weight_NK = linear.weight.detach().contiguous()
    rows, columns = weight_NK.shape
    pack = library.entry("pack", weight_NK.dtype)
    pack(weight_NK.data_ptr(), rows, columns, packed.data_ptr(), group, stride, start)


def _bias(linears: Sequence[nn.Linear], join: Join) -> torch.Tensor | None:
    """The biases joined as the weights were, float32; None where no layer has one."""
    biases: list[torch.Tensor | None] = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    widths = [linear.out_features for linear in linears]
    parts = [torch.zeros(n) if bias is None else bias.detach().float() for n, bias in zip(widths, biases, strict=True)]
    return join(parts).contiguous()
