"""What the processes of tests/cluster/parallel do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from cluster.errors import PeerLost
from cluster.parallel.collectives import all_reduce, broadcast, gather_columns, receive, send
from cluster.parallel.groups import Endpoint, Group, join


@dataclass(frozen=True)
class Results:
    """What one rank got from every collective."""

    total: list[float]
    copied: list[int]
    columns: list[list[float]] | None
    passed: float


def everything(endpoint: Endpoint, rank: int, size: int) -> Results:
    """Every collective once: rank r contributes r + 1, and r + 1 columns."""
    group = join(endpoint, rank, size, timeout_s=20)
    mine = torch.full((2,), float(rank + 1))
    columns = torch.full((2, rank + 1), float(rank))
    around = torch.tensor([float(rank)])
    if rank == 0:
        send(group, around, 1, tag=7)
        receive(group, around, size - 1, tag=7)
    else:
        receive(group, torch.empty(1), rank - 1, tag=7)
        send(group, around, (rank + 1) % size, tag=7)
    gathered = gather_columns(group, columns, [each + 1 for each in range(size)])
    results = Results(
        total=all_reduce(group, mine).tolist(),
        copied=broadcast(group, torch.arange(4, dtype=torch.int32) * (rank == 1), root=1).tolist(),
        columns=None if gathered is None else gathered.tolist(),
        passed=float(around),
    )
    group.close()
    return results


def lose_one(endpoint: Endpoint, rank: int, size: int, timeout_s: float) -> Iterator[tuple[str, float, float]]:
    """Two groups of the same processes but for the last rank, which is in the first only and never answers.

    Each tells when it is ready; then the error, the time it was raised at, and what the second group still sums to.
    """
    group = join(endpoint, rank, size, name="first", timeout_s=timeout_s, meet_s=60)
    if rank == size - 1:
        yield "ready", time.monotonic(), 0.0
        time.sleep(600)
    second = join(endpoint, rank, size - 1, name="second", timeout_s=timeout_s, meet_s=60)
    yield "ready", time.monotonic(), 0.0
    message, at = _failure(group), time.monotonic()
    assert _failure(group) == message  # a group that is dead says so at once, and why
    yield message, at, float(all_reduce(second, torch.ones(1)))


def _failure(group: Group) -> str:
    with pytest.raises(PeerLost) as failure:
        all_reduce(group, torch.ones(1))
    return str(failure.value)


def come(endpoint: Endpoint, rank: int, size: int, named: int, timeout_s: float) -> str:
    """Join as one of `named`, of which only `size` come."""
    try:
        join(endpoint, rank, named, name="tp", timeout_s=timeout_s)
    except PeerLost as error:
        return str(error)
    return "joined"
