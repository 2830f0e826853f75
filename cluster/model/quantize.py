"""Weights in 8 or 4 bits: a model that reads fewer bytes a token, at the price of small errors.

Knows: how a linear layer's weight is rounded and which torch kernels multiply by it on a CPU.
Refuses to know: what the model is for. It changes what a model says, so only drafts are made so.

8 bits: one scale a row (symmetric). 4 bits: one scale and offset for each group of columns in a
row; a layer whose shape the 4-bit kernel does not take is kept in 8. Activations keep their dtype.

Legend of shape suffixes: M rows, K input columns, N output columns, G groups of a row.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from cluster.errors import ModelUnsupported
from cluster.model.pattern import release

Bits = Literal[8, 4]

#: Columns that share a scale in 4 bits, and the rows the kernel takes at a time.
_GROUP = 32
_ROWS = 16


def bias_of(linear: nn.Linear) -> torch.Tensor | None:
    bias: torch.Tensor | None = linear.bias
    return None if bias is None else bias.detach()


class Int8Linear(nn.Module):
    """y = x W^T + b with W rounded to -127..127 by row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = linear.in_features, linear.out_features, 8
        weight_NK = linear.weight.detach().float()
        scale_N = weight_NK.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self._weight = (weight_NK / scale_N[:, None]).round().to(torch.int8)
        self._scale = scale_N.to(linear.weight.dtype)
        self._bias = bias_of(linear)

    def forward(self, input_MK: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N], in the dtype of the input."""
        rows_MK = input_MK.reshape(-1, self.in_features)
        out_MN: torch.Tensor = torch.ops.aten._weight_int8pack_mm(rows_MK, self._weight, self._scale)
        if self._bias is not None:
            out_MN = out_MN + self._bias
        return out_MN.view(*input_MK.shape[:-1], self.out_features)


class Int4Linear(nn.Module):
    """y = x W^T + b with W rounded to 16 steps between the least and the greatest of each group."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = linear.in_features, linear.out_features, 4
        groups_NGK = linear.weight.detach().float().view(linear.out_features, -1, _GROUP)
        least_NG, greatest_NG = groups_NGK.amin(dim=2), groups_NGK.amax(dim=2)
        scale_NG = ((greatest_NG - least_NG) / 15).clamp(min=torch.finfo(torch.float32).tiny)
        steps_NGK = ((groups_NGK - least_NG[..., None]) / scale_NG[..., None]).round().clamp(0, 15)
        # The kernel reads a step s as (s - 8) * scale + middle.
        middle_NG = least_NG + 8 * scale_NG
        pairs_GN2 = torch.stack([scale_NG, middle_NG], dim=2).transpose(0, 1).contiguous()
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps_NGK.flatten(1).to(torch.int32), 1)
        self._scales_and_middles = pairs_GN2.to(linear.weight.dtype)
        self._bias = bias_of(linear)

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        return linear.in_features % _GROUP == 0 and linear.out_features % _ROWS == 0

    def forward(self, input_MK: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N], in the dtype of the input."""
        rows_MK = input_MK.reshape(-1, self.in_features)
        out_MN: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows_MK, self._weight, _GROUP, self._scales_and_middles
        )
        if self._bias is not None:
            out_MN = out_MN + self._bias
        return out_MN.view(*input_MK.shape[:-1], self.out_features)


@torch.no_grad()
def quantize_linears(module: Any, bits: Bits) -> None:
    """Replace a causal language model's linear layers, releasing each original as it goes.

    The head is kept in 8 bits: what it loses goes straight into the guess. Embeddings stay whole.
    Raises ModelUnsupported away from a CPU, where these kernels do not run.
    """
    if module.device.type != "cpu":
        raise ModelUnsupported(f"a quantized copy runs on a CPU only, not on {module.device}: use kind: model")
    for parent in list(module.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int4Linear(child) if bits == 4 and Int4Linear.takes(child) else Int8Linear(child))
                release(child)
    head = module.lm_head
    if type(head) is nn.Linear:
        module.lm_head = Int8Linear(head)
        if head.weight is not module.model.embed_tokens.weight:
            release(head)
