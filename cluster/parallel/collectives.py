"""What the members of a group do together: sum, copy from one, gather columns, pass along.

Knows: the order of the ranks and that widths may differ between them.
Refuses to know: how a group came to be and what the tensors mean.

Every function must be called by every member it concerns, in the same order, from one thread at a
time; each raises PeerLost as `Group.run` does. In a group of one they cost nothing.

Legend of shape suffixes: N rows, V columns of the whole, W columns of the widest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from cluster.parallel.groups import Group


def all_reduce(group: Group, tensor: torch.Tensor, timeout_s: float | None = None) -> torch.Tensor:
    """Replace a contiguous tensor by its sum over the ranks, the same bits on each; returns it.

    timeout_s: another deadline than the group's, where ranks may come late.
    """
    if group.size > 1:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s or group.timeout_s)
        group.run("all-reduce", tensor, lambda carrier: carrier.allreduce([tensor], options))
    return tensor


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Overwrite a contiguous tensor by the root's; returns it."""
    if group.size > 1:
        group.run(f"broadcast from rank {root}", tensor, lambda carrier: carrier.broadcast(tensor, root))
    return tensor


def barrier(group: Group, timeout_s: float) -> None:
    """Return when every rank has come here; those that load something may take longer than a step may."""
    all_reduce(group, torch.zeros(1), timeout_s)


def gather_columns(group: Group, piece: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
    """The ranks' [N, widths[rank]] pieces side by side, [N, V], at rank 0; None elsewhere."""
    if group.size == 1:
        return piece
    # Backends gather equal shapes only: narrower pieces travel padded.
    padded_NW = torch.nn.functional.pad(piece, (0, max(widths) - widths[group.rank])).contiguous()
    pieces = [torch.empty_like(padded_NW) for _ in widths] if group.rank == 0 else []
    options = dist.GatherOptions()
    options.rootRank = 0
    group.run("gather", padded_NW, lambda carrier: carrier.gather([pieces] if pieces else [], [padded_NW], options))
    if not pieces:
        return None
    return torch.cat([each_NW[:, :width] for each_NW, width in zip(pieces, widths, strict=True)], dim=1)


def send(group: Group, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
    """Pass a contiguous tensor to one rank, which receives it with the same tag."""
    group.run(f"send to rank {to}", tensor, lambda carrier: carrier.send([tensor], to, tag))


def receive(group: Group, tensor: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
    """Overwrite a contiguous tensor by what a rank sends with the same tag; returns it."""
    group.run(f"receive from rank {source}", tensor, lambda carrier: carrier.recv([tensor], source, tag))
    return tensor
