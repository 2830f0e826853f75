"""Paged attention in plain torch: the truth the kernels are compared with, on any device.

Knows: how to gather a row's pages and compute softmax attention over them in float32.
Refuses to know: speed. It takes one pass a row.

Legend of shape suffixes: see base.py; K keys of one row, N queries of one row.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from cluster.kv.store import Arena
from cluster.model.attention.base import Ragged, Variant


class PlainBackend:
    """Backend (base.py) in torch operations only."""

    name: ClassVar[str] = "plain"

    def write(self, arena: Arena, layer: int, ragged: Ragged, keys_THD: torch.Tensor, values_THD: torch.Tensor) -> None:
        slots = torch.from_numpy(ragged.slots_T).to(arena.device)
        blocks, offsets = slots // arena.block_tokens, slots % arena.block_tokens
        arena.keys(layer)[blocks, :, offsets] = keys_THD.to(arena.dtype)
        arena.values(layer)[blocks, :, offsets] = values_THD.to(arena.dtype)

    def attend(
        self, arena: Arena, layer: int, ragged: Ragged, queries_TQD: torch.Tensor, variant: Variant
    ) -> torch.Tensor:
        out_TQD = torch.empty_like(queries_TQD)
        for r in range(ragged.num_rows):
            start, end = int(ragged.starts[r]), int(ragged.starts[r + 1])
            known = int(ragged.firsts_R[r]) + end - start
            used = -(-known // arena.block_tokens)
            table = torch.from_numpy(ragged.tables_RW[r, :used]).to(arena.device, torch.int64)
            keys_HKD = _pages(arena.keys(layer), table, known)
            values_HKD = _pages(arena.values(layer), table, known)
            hidden = _hidden(ragged, r, known, variant.window).to(arena.device)
            out_TQD[start:end] = _attend_row(queries_TQD[start:end], keys_HKD, values_HKD, hidden, variant)
        return out_TQD


def _pages(pages_BHTD: torch.Tensor, table: torch.Tensor, known: int) -> torch.Tensor:
    """The first `known` tokens of a row, float32 [H, K, D]."""
    _, heads, _, dim = pages_BHTD.shape
    return pages_BHTD[table].transpose(0, 1).reshape(heads, -1, dim)[:, :known].float()


def _hidden(ragged: Ragged, r: int, known: int, window: int | None) -> torch.Tensor:
    """Which of a row's `known` keys each of its queries must not see, bool [N, K]."""
    start, end = int(ragged.starts[r]), int(ragged.starts[r + 1])
    query_at = torch.from_numpy(ragged.positions_T[start:end])[:, None]
    key_at = torch.arange(known)[None, :]
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at <= query_at - window
    if ragged.sights_T is None or ragged.roots_R is None:
        return hidden
    root = int(ragged.roots_R[r])
    for n, seen in enumerate(ragged.sights_T[start:end].tolist()):
        if seen:
            nodes = [root + node for node in range(known - root) if seen >> node & 1]  # in the order of their depths
            hidden[n, root:] = True
            hidden[n, nodes if window is None else nodes[-window:]] = False
    return hidden


def _attend_row(
    queries_NQD: torch.Tensor,
    keys_HKD: torch.Tensor,
    values_HKD: torch.Tensor,
    hidden_NK: torch.Tensor,
    variant: Variant,
) -> torch.Tensor:
    num, query_heads, dim = queries_NQD.shape
    heads = keys_HKD.shape[0]
    group = query_heads // heads
    queries_HGND = queries_NQD.float().view(num, heads, group, dim).permute(1, 2, 0, 3)
    scores_HGNK = torch.matmul(queries_HGND, keys_HKD[:, None].transpose(2, 3)) * variant.scaling
    if variant.softcap is not None:
        scores_HGNK = torch.tanh(scores_HGNK / variant.softcap) * variant.softcap
    scores_HGNK = scores_HGNK.masked_fill(hidden_NK, float("-inf"))
    if variant.sinks_Q is not None:
        sinks = variant.sinks_Q.float().view(heads, group, 1, 1).expand(heads, group, num, 1)
        laws_HGNK = torch.softmax(torch.cat([scores_HGNK, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        laws_HGNK = torch.softmax(scores_HGNK, dim=-1)
    out_HGND = torch.matmul(laws_HGNK, values_HKD[:, None])
    return out_HGND.permute(2, 0, 1, 3).reshape(num, query_heads, dim).to(queries_NQD.dtype)
