"""Replaces the linear layers of any transformers model by packed ones, leaving the rest as it is.

Knows: which modules can be replaced without the modelling code noticing.
Refuses to know: families. Models of the Llama pattern take a shorter road (fused.py).

Legend of shape suffixes: M rows, K input columns, N output columns.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from cluster.kernels.library import Library
from cluster.model.packed import pack_side_by_side, round_up
from cluster.model.pattern import release
from cluster.model.shard_modules import RowParallel


class PackedModule(nn.Module):
    """What an nn.Linear computes, over packed weights, accumulated in float32.

    wide: the output is float32 whatever the input is, as a head's must be: rounding logits to
    bfloat16 makes ties of near-ties.
    """

    def __init__(self, linear: nn.Linear, library: Library, *, wide: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = pack_side_by_side(library, [linear])
        self._out_dtype = torch.float32 if wide else self._packed.dtype
        self._project = library.entry("project_wide" if wide else "project", self._packed.dtype)

    @property
    def nbytes(self) -> int:
        """Of what a product reads."""
        return self._packed.nbytes

    def forward(self, input_MK: torch.Tensor) -> torch.Tensor:
        """[..., K] in the dtype of the weights to [..., N]."""
        rows_MK = input_MK.reshape(-1, self.in_features).contiguous()
        rows = len(rows_MK)
        out_MN = torch.empty(rows, self.out_features, dtype=self._out_dtype)
        staged = torch.zeros(round_up(rows, 16), self._packed.depth, dtype=rows_MK.dtype)
        self._project(
            torch.get_num_threads(),
            ctypes.addressof(self._packed.view),
            rows_MK.data_ptr(),
            rows,
            self.in_features,
            staged.data_ptr(),
            out_MN.data_ptr(),
        )
        return out_MN.view(*input_MK.shape[:-1], self.out_features)


def pack_linears(module: Any, library: Library) -> None:
    """Replace a model's linear layers and its head, releasing each original as it goes.

    Only modules that are exactly nn.Linear: a subclass may compute something else.
    """
    for parent in list(module.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                # Parts of a sum over ranks are rounded once, afterwards.
                setattr(parent, name, PackedModule(child, library, wide=isinstance(parent, RowParallel)))
                release(child)
    head = module.lm_head
    if type(head) is nn.Linear:
        module.lm_head = PackedModule(head, library, wide=True)
        if head.weight is not module.model.embed_tokens.weight:
            release(head)
