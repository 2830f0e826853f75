"""What attention is asked to compute: the ragged layout of a step and the variant a layer wants.

Knows: where each token of a step sits, in the step and in the arena.
Refuses to know: how any backend computes, and which model asks.

A step is flat: the tokens of all its rows one behind the other.

    row 0 (chunk of a prompt)   row 1      row 2 (token + 3 drafts)
    | p=64 p=65 ... p=127 |     | p=17 |   | p=300 p=301 p=302 p=303 |
    ^ starts[0]                 ^ starts[1] ^ starts[2]               ^ starts[3] = T

A row may end in a tree (`PlanRow.parents`): its nodes fill slots one after the other, but a node's
position is by its depth, and it sees what was there before the tree, its ancestors and itself.

Legend of shape suffixes: T tokens of the step, R rows, W blocks of the longest row, Q query heads,
H kv heads, G query heads a kv head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import BrokenInvariant
from cluster.kv.store import Arena
from cluster.messages import PlanRow
from cluster.tree import LARGEST, sights


@dataclass(frozen=True, slots=True)
class Ragged:
    """Index arrays of one step, shared by all layers.

    positions_T int64; slots_T int64, block * block_tokens + offset of each token; starts int32
    [R + 1], where a row's tokens begin; firsts_R int32, place of a row's first token in the row;
    tables_RW int32, block tables, padded with 0. All C-contiguous, on the host.
    Where a row holds a tree: roots_R int32, place of a row's first node; sights_T uint64, bit j for
    node j of the token's own row, 0 for a token before the tree.
    """

    positions_T: npt.NDArray[np.int64]
    slots_T: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int32]
    firsts_R: npt.NDArray[np.int32]
    tables_RW: npt.NDArray[np.int32]
    roots_R: npt.NDArray[np.int32] | None = None
    sights_T: npt.NDArray[np.uint64] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.positions_T)

    @property
    def num_rows(self) -> int:
        return len(self.firsts_R)

    @staticmethod
    def of(rows: Sequence[PlanRow], *, block_tokens: int, num_blocks: int) -> Ragged:
        """Lay out the rows of a plan.

        Raises BrokenInvariant when a block table does not cover its row or names a block that
        does not exist, or a tree is larger than LARGEST or hangs on tokens that are not there.
        """
        lengths = np.fromiter((len(row.tokens) for row in rows), np.int32, len(rows))
        firsts = np.fromiter((row.first for row in rows), np.int32, len(rows))
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), np.int32)
        for r, row in enumerate(rows):
            if len(row.blocks) * block_tokens < row.end or row.first < 0:
                raise BrokenInvariant(
                    f"sequence {row.sequence}: {len(row.blocks)} blocks do not cover {row.end} tokens"
                )
            tables[r, : len(row.blocks)] = row.blocks
        if tables.min() < 0 or tables.max() >= num_blocks:
            raise BrokenInvariant(f"a block table names a block outside 0..{num_blocks - 1}")
        owner = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(starts[-1], dtype=np.int64) + (firsts - starts[:-1])[owner]
        slots = tables[owner, positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
        if all(row.parents is None for row in rows):
            return Ragged(positions, slots, starts, firsts, tables)
        roots, seen = _trees(rows, starts, positions)
        return Ragged(positions, slots, starts, firsts, tables, roots, seen)


def _trees(
    rows: Sequence[PlanRow], starts: npt.NDArray[np.int32], positions_T: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
    """roots_R and sights_T of `Ragged`; puts the positions of nodes right."""
    roots = np.fromiter((row.root for row in rows), np.int32, len(rows))
    seen = np.zeros(len(positions_T), np.uint64)
    for row, start, end in zip(rows, starts, starts[1:], strict=False):
        if row.parents is not None:
            if len(row.parents) > LARGEST or row.root < 1:
                raise BrokenInvariant(f"sequence {row.sequence}: a tree of {len(row.parents)} nodes at {row.root}")
            positions_T[start:end] = row.positions
            nodes = sights(row.parents)[max(0, row.first - row.root) :]
            seen[end - len(nodes) : end] = nodes
    return roots, seen


@dataclass(frozen=True, slots=True)
class Variant:
    """The attention a layer asks for.

    window: a query at p sees keys p - window + 1 .. p; None sees all.
    softcap: scores become softcap * tanh(score / softcap).
    sinks_Q: one extra logit a query head, in the softmax's denominator only.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks_Q: torch.Tensor | None = None


class Backend(Protocol):
    """Paged attention on one kind of device. A row's result does not depend on the other rows."""

    name: ClassVar[str]

    def write(self, arena: Arena, layer: int, ragged: Ragged, keys_THD: torch.Tensor, values_THD: torch.Tensor) -> None:
        """Put keys and values of the step's tokens into their slots."""

    def attend(
        self, arena: Arena, layer: int, ragged: Ragged, queries_TQD: torch.Tensor, variant: Variant
    ) -> torch.Tensor:
        """Attention of every token over its own row, [T, Q, D] in the dtype of the queries."""
