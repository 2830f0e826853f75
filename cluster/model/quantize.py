"""Weights in 8 or 4 bits: a model that reads fewer bytes a token, at the price of small errors.

Knows: how a linear layer's weight is rounded, and what numbers the rounded weight stands for.
Refuses to know: how products are computed from it (packed.py) and what the model is for.

Groups of 32 columns of a row share a scale and an offset in half precision: weight = level * scale +
offset. 8 bits: levels -127 to 127 about an offset of 0. 4 bits: levels 0 to 15 from the group's least
to its greatest. These are the groups and numbers of GGUF's Q8_0 and Q4_1, so that weights which came
from such a file are rounded to what they were, without loss.

Legend of shape suffixes: K input columns, N output columns, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from cluster.errors import ModelUnsupported

Bits = Literal[8, 4]

#: Columns that share a scale.
GROUP = 32


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight as levels. levels_NK: int8, K a multiple of GROUP; scale_NG, offset_NG: float16."""

    bits: Bits
    levels_NK: torch.Tensor
    scale_NG: torch.Tensor
    offset_NG: torch.Tensor

    def weight(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The numbers it stands for, [N, columns], rounded to `dtype` once."""
        levels_NGK = self.levels_NK.float().view(*self.scale_NG.shape, GROUP)
        weight_NGK = levels_NGK * self.scale_NG.float()[..., None] + self.offset_NG.float()[..., None]
        weight_NK: torch.Tensor = weight_NGK.flatten(1)[:, :columns].to(dtype).contiguous()
        return weight_NK


def round_weight(weight_NK: torch.Tensor, bits: Bits) -> Rounded:
    """A weight in so many bits; columns short of a whole group repeat the last one, which nothing reads."""
    weight_NK = weight_NK.detach().float()
    short = -weight_NK.shape[1] % GROUP
    padded_NK = torch.cat([weight_NK, weight_NK[:, -1:].expand(-1, short)], dim=1)
    groups_NGK = padded_NK.view(len(padded_NK), -1, GROUP)
    least_NG, greatest_NG = groups_NGK.amin(dim=2), groups_NGK.amax(dim=2)
    if bits == 8:
        offset_NG = torch.zeros_like(least_NG).half()
        scale_NG = (torch.maximum(-least_NG, greatest_NG) / 127).half()
        fewest, most = -127, 127
    else:
        offset_NG = least_NG.half()
        scale_NG = ((greatest_NG - least_NG) / 15).half()
        fewest, most = 0, 15
    # A group of one value has scale 0: any level stands for its offset.
    steps_NG = torch.where(scale_NG == 0, 1.0, scale_NG.float())
    levels_NGK = ((groups_NGK - offset_NG.float()[..., None]) / steps_NG[..., None]).round().clamp(fewest, most)
    return Rounded(bits, levels_NGK.to(torch.int8).flatten(1), scale_NG, offset_NG)


def rounded_of(linear: nn.Linear) -> Rounded | None:
    """The levels behind a layer's weight, where `quantize_linears` has rounded it."""
    found = getattr(linear, "rounded", None)
    assert found is None or isinstance(found, Rounded)
    return found


@torch.no_grad()
def quantize_linears(module: Any, bits: Bits) -> None:
    """Round the linear layers of a causal language model; each keeps its levels beside the numbers they stand for.

    The head is kept in 8 bits: what it loses goes straight into the answer. Embeddings stay whole.
    Raises ModelUnsupported away from a CPU, where no kernel reads levels.
    """
    if module.device.type != "cpu":
        raise ModelUnsupported(f"weights in {bits} bits run on a CPU only, not on {module.device}: leave bits out")
    for parent in list(module.model.layers.modules()):
        for child in list(parent.children()):
            if type(child) is nn.Linear:
                _round(child, bits)
    if type(module.lm_head) is nn.Linear:
        if module.lm_head.weight is module.model.embed_tokens.weight:
            module.lm_head.weight = nn.Parameter(module.lm_head.weight.clone(), requires_grad=False)
        _round(module.lm_head, 8)


def _round(linear: nn.Linear, bits: Bits) -> None:
    rounded = round_weight(linear.weight, bits)
    linear.weight.data = rounded.weight(linear.in_features, linear.weight.dtype)
    linear.rounded = rounded  # type: ignore[assignment]  # a plain attribute, no parameter
