"""Weights rearranged once for the kernels, and the buffers their rows are staged in.

Knows: how to pack one or several linear layers into the layout of kernels/gemm.h.
Refuses to know: which layers of a model those are.

Legend of shape suffixes: N output columns, K input columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from cluster.kernels.library import Library, Linear

_PANEL = 32


def round_up(size: int, to: int) -> int:
    return -(-size // to) * to


class PackedLinear:
    """One packed weight and what keeps it alive. `view` is what kernels take."""

    def __init__(self, packed: torch.Tensor, bias_N: torch.Tensor | None, columns: int, depth: int) -> None:
        self._keep = (packed, bias_N)
        self.columns = columns
        self.depth = depth
        self.dtype = packed.dtype
        self.view = Linear(packed.data_ptr(), None if bias_N is None else bias_N.data_ptr(), columns, depth)

    @property
    def nbytes(self) -> int:
        return self._keep[0].nbytes


def pack_side_by_side(library: Library, linears: Sequence[nn.Linear]) -> PackedLinear:
    """Several weights over the same input as one: their columns one behind the other."""
    widths = [linear.out_features for linear in linears]
    packed, depth = _blank(sum(widths), linears[0])
    at = 0
    for linear, width in zip(linears, widths, strict=True):
        # Shifting by `at` inside one group: group and stride beyond any row keep the order.
        _pack(library, linear, packed, group=1 << 40, stride=1 << 40, start=at)
        at += width
    return PackedLinear(packed, _bias(linears, torch.cat), sum(widths), depth)


def pack_interleaved(library: Library, gate: nn.Linear, up: nn.Linear) -> PackedLinear:
    """Gate and up in alternating runs of 16 columns, so that one panel holds what multiplies each other."""
    width = round_up(gate.out_features, 16)
    packed, depth = _blank(2 * width, gate)
    _pack(library, gate, packed, group=16, stride=32, start=0)
    _pack(library, up, packed, group=16, stride=32, start=16)

    def weave(parts: list[torch.Tensor]) -> torch.Tensor:
        padded = [nn.functional.pad(part, (0, width - len(part))).view(-1, 16) for part in parts]
        return torch.stack(padded, dim=1).flatten()

    return PackedLinear(packed, _bias([gate, up], weave), 2 * width, depth)


def _blank(columns: int, linear: nn.Linear) -> tuple[torch.Tensor, int]:
    depth = round_up(linear.in_features, 32)
    return torch.zeros(round_up(columns, _PANEL), depth, dtype=linear.weight.dtype), depth


def _pack(library: Library, linear: nn.Linear, packed: torch.Tensor, *, group: int, stride: int, start: int) -> None:
    weight_NK = linear.weight.detach().contiguous()
    rows, columns = weight_NK.shape
    pack = library.entry("pack", weight_NK.dtype)
    pack(weight_NK.data_ptr(), rows, columns, packed.data_ptr(), group, stride, start)


def _bias(linears: Sequence[nn.Linear], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor | None:
    """The biases joined as the weights were, float32; None where no layer has one."""
    biases: list[torch.Tensor | None] = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    widths = [linear.out_features for linear in linears]
    parts = [torch.zeros(n) if bias is None else bias.detach().float() for n, bias in zip(widths, biases, strict=True)]
    return join(parts).contiguous()
