"""Paged attention by the C++ kernel: the Backend of CPUs.

Knows: how a step and an arena are described to kernels/attention.h.
Refuses to know: the arithmetic (there) and the truth it is held to (plain.py).
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

from cluster.kernels.library import Library, Paged
from cluster.kv.store import Arena
from cluster.model.attention.base import Ragged, Variant
from cluster.model.attention.plain import PlainBackend

_MOST_GROUP = 32  # TILE in attention.h
_WIDEST = 256  # WIDEST in attention.h


class CpuBackend:
    """Backend (base.py) for float32 and bfloat16 arenas in host memory.

    Head dimensions above 256 and more than 32 query heads a kv head go to the plain twin.
    """

    name: ClassVar[str] = "cpu"

    def __init__(self, library: Library) -> None:
        self._library = library
        self._plain = PlainBackend()

    def write(self, arena: Arena, layer: int, ragged: Ragged, keys_THD: torch.Tensor, values_THD: torch.Tensor) -> None:
        self._plain.write(arena, layer, ragged, keys_THD, values_THD)

    def attend(
        self, arena: Arena, layer: int, ragged: Ragged, queries_TQD: torch.Tensor, variant: Variant
    ) -> torch.Tensor:
        group = queries_TQD.shape[1] // arena.num_kv_heads
        if group > _MOST_GROUP or arena.head_dim > _WIDEST or queries_TQD.dtype != arena.dtype:
            return self._plain.attend(arena, layer, ragged, queries_TQD, variant)
        if queries_TQD.stride(2) != 1:
            queries_TQD = queries_TQD.contiguous()
        out_TQD = torch.empty(queries_TQD.shape, dtype=queries_TQD.dtype)
        sinks = None if variant.sinks_Q is None else variant.sinks_Q.detach().float().contiguous()
        paged = describe(arena, layer, ragged, group, variant, sinks)
        self._library.entry("attend", arena.dtype)(
            torch.get_num_threads(),
            ctypes.addressof(paged),
            queries_TQD.data_ptr(),
            queries_TQD.stride(0),
            queries_TQD.stride(1),
            out_TQD.data_ptr(),
        )
        return out_TQD


def describe(
    arena: Arena, layer: int, ragged: Ragged, group: int, variant: Variant, sinks_Q: torch.Tensor | None = None
) -> Paged:
    """A step of one layer as the kernels take it. The caller keeps `ragged` and `sinks_Q` alive."""
    return Paged(
        pages=arena.address(layer),
        block_bytes=arena.block_bytes,
        block_tokens=arena.block_tokens,
        heads=arena.num_kv_heads,
        dim=arena.head_dim,
        starts=ragged.starts.ctypes.data,
        firsts=ragged.firsts_R.ctypes.data,
        tables=ragged.tables_RW.ctypes.data,
        rows=ragged.num_rows,
        width=ragged.tables_RW.shape[1],
        group=group,
        scaling=variant.scaling,
        softcap=variant.softcap or 0.0,
        window=variant.window or 0,
        sinks=None if sinks_Q is None else sinks_Q.data_ptr(),
        roots=None if ragged.roots_R is None else ragged.roots_R.ctypes.data,
        sights=None if ragged.sights_T is None else ragged.sights_T.ctypes.data,
    )
