"""The ranks of a tensor-parallel model as threads of one process: real groups over real sockets, started at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from cluster.kv.store import Arena
from cluster.model.load import LoadedModel, load_model, locate
from cluster.model.sharded_runner import Part, ShardedRunner, follow
from cluster.model.torch_runner import arena_for
from cluster.parallel.groups import Rendezvous, join

BLOCK = 4
BLOCKS = 64
CPU = torch.device("cpu")


@contextmanager
def sharded(
    source: str | Path, size: int, *, dtype: torch.dtype = torch.float32, kernels: bool = True
) -> Iterator[ShardedRunner]:
    """Rank 0's runner of a model over `size` ranks; the others follow it in threads until the block is left."""
    rendezvous = Rendezvous.host()
    files = locate(str(source))
    # One after the other: transformers' way of being quiet is one for the whole process.
    loaded = [load_model(files, dtype=dtype, device=CPU, rank=rank, ranks=size) for rank in range(size)]

    def part(rank: int) -> Part:
        group = join(rendezvous.endpoint, rank, size, name="tp", timeout_s=30)
        return Part(loaded[rank], poisoned(loaded[rank]), group, kernels=kernels, ready_s=60)

    with ThreadPoolExecutor(size - 1) as pool:
        followers: list[Future[None]] = [pool.submit(lambda rank=rank: follow(part(rank))) for rank in range(1, size)]
        runner = ShardedRunner(part(0))
        try:
            yield runner
        finally:
            runner.close()
            for follower in followers:
                follower.result(30)
    rendezvous.close()


def poisoned(loaded: LoadedModel) -> Arena:
    """An arena for a model in which nothing unwritten may be read."""
    arena = arena_for(loaded.info, BLOCKS, block_tokens=BLOCK)
    for block in range(arena.num_blocks):
        arena.block(block).view(arena.dtype).fill_(float("nan"))
    return arena
