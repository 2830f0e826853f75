"""The modules in which the ranks of a tensor-parallel model meet, and how they get into a model.

Knows: after which modules partial results are summed over the ranks, and which others see only a
part of what they need.
Refuses to know: which part a rank holds (shard.py), plans, kernels: linear layers may be replaced
by packed ones afterwards.

Legend of shape suffixes: T tokens, E hidden width, D columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cluster.errors import ModelUnsupported
from cluster.model.shard import BACK, EXPERTS, HEAD_NORMS, Portion, head_dim_of
from cluster.parallel.collectives import all_reduce
from cluster.parallel.groups import Group

_NORM_ERROR = 1e-5


class RowParallel(nn.Module):
    """A linear layer of whose inputs this rank has a part: the sum over the ranks, and the bias once.

    The inner layer may give float32 whatever its input: then that is what is summed.
    """

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__()
        self.bias: nn.Parameter | None = linear.bias
        linear.register_parameter("bias", None)
        self.linear: nn.Module = linear
        self._group = group

    def forward(self, input_TD: torch.Tensor) -> torch.Tensor:
        """[..., D] to [..., E], the same on every rank."""
        sum_TE = all_reduce(self._group, self.linear(input_TD).contiguous())
        if self.bias is not None:
            sum_TE = sum_TE + self.bias
        return sum_TE.to(input_TD.dtype)


class PartialExperts(nn.Module):
    """Experts that each hold a part of their columns here: what they return is summed over the ranks."""

    def __init__(self, experts: nn.Module, group: Group) -> None:
        super().__init__()
        self.experts = experts
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return all_reduce(self._group, self.experts(*args, **kwargs).contiguous())


class VocabularyRows(nn.Module):
    """An embedding of whose rows this rank has a run; the others' come from the sum, which adds only zeros."""

    def __init__(self, embedding: nn.Module, rows: range, group: Group) -> None:
        super().__init__()
        self.embedding = embedding
        self._rows = rows
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        """Of this rank's rows."""
        weight = self.embedding.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        here = tokens - self._rows.start
        elsewhere = (here < 0) | (here >= len(self._rows))
        found_TE = self.embedding(here.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        return all_reduce(self._group, found_TE.contiguous())


class SpanningNorm(nn.Module):
    """A root-mean-square norm over the heads of all ranks together, of which this rank has some.

    copies: how many ranks hold each column; each counts as one in `copies`.
    Raises ModelUnsupported when the norm it replaces computes something else.
    """

    def __init__(self, norm: Any, width: int, copies: int, group: Group) -> None:
        super().__init__()
        self.weight = norm.weight
        self._epsilon = float(norm.variance_epsilon)
        self._width, self._copies, self._group = width, copies, group
        probe_TD = torch.linspace(-2, 3, 2 * len(self.weight), device=self.weight.device).view(2, -1)
        probe_TD = probe_TD.to(self.weight.dtype)
        own_T1 = probe_TD.float().pow(2).mean(-1, keepdim=True)
        error = (self._scaled(probe_TD, own_T1) - norm(probe_TD)).abs().max() / norm(probe_TD).abs().max()
        if not error <= max(_NORM_ERROR, 2 * torch.finfo(self.weight.dtype).eps):
            raise ModelUnsupported(f"{type(norm).__name__} over all heads is not a root-mean-square norm")

    def forward(self, input_TD: torch.Tensor) -> torch.Tensor:
        squares_T1 = input_TD.float().pow(2).sum(-1, keepdim=True) / self._copies
        return self._scaled(input_TD, all_reduce(self._group, squares_T1) / self._width)

    def _scaled(self, input_TD: torch.Tensor, variance_T1: torch.Tensor) -> torch.Tensor:
        normed_TD = input_TD.float() * torch.rsqrt(variance_T1 + self._epsilon)
        scaled_TD: torch.Tensor = (self.weight * normed_TD).to(input_TD.dtype)
        return scaled_TD


def join_ranks(module: Any, portion: Portion, group: Group) -> None:
    """Make a rank's part of a causal language model, as loaded, compute the whole together with the others'.

    What it returns afterwards are the logits of this rank's words alone.
    Raises ModelUnsupported for a norm over all heads of another kind than root mean square.
    """
    for path, child in list(module.named_modules()):
        meeting = _meeting(path, child, portion, group)
        if meeting is not None:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, meeting)


def _meeting(path: str, child: nn.Module, portion: Portion, group: Group) -> nn.Module | None:
    """What takes the place of a module; None where no rank needs another."""
    style = portion.style(path)
    share, whole = portion.share, portion.whole
    if style == EXPERTS:
        return PartialExperts(child, group)
    if style == "embedding_rowwise":
        return VocabularyRows(child, share.of_columns(whole.vocab_size), group)
    if style in BACK and isinstance(child, nn.Linear):
        return RowParallel(child, group)
    if path.endswith(HEAD_NORMS) and f"{path}.weight" in portion.cuts:
        queries = path.endswith("q_norm")
        heads = whole.num_attention_heads if queries else whole.num_key_value_heads
        return SpanningNorm(child, heads * head_dim_of(whole), 1 if queries else share.copies, group)
    return None
