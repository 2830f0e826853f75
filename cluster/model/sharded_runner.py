"""One model over several ranks: rank 0 computes plans as any runner does, the others follow it.

Knows: that every rank computes the same plan with its own part and its own heads' cache, and that
the logits of all words come together at rank 0.
Refuses to know: which part a rank holds (shard.py), where its modules meet (shard_modules.py), how
a step is told (orders.py).

Legend of shape suffixes: N positions that want logits, V vocabulary.
"""

from __future__ import annotations

import torch

from cluster.errors import BrokenInvariant
from cluster.kv.store import Arena
from cluster.messages import Plan
from cluster.model.load import LoadedModel
from cluster.model.orders import Leader, orders
from cluster.model.runner import Flight
from cluster.model.shard_modules import join_ranks
from cluster.model.torch_runner import TorchRunner
from cluster.parallel.collectives import barrier, gather_columns
from cluster.parallel.groups import Group


class Part:
    """One rank's part of a model over the arena of its heads, ready to compute with the others.

    Returns when all ranks are ready; takes the module over, as TorchRunner does.
    ready_s: deadline for the slowest of them to load and pack its part.
    Raises ModelUnsupported, PeerLost.
    """

    def __init__(
        self, loaded: LoadedModel, arena: Arena, group: Group, *, kernels: bool = True, ready_s: float = 900.0
    ) -> None:
        portion = loaded.portion
        if portion is None or (portion.share.rank, portion.share.size) != (group.rank, group.size):
            raise BrokenInvariant(f"{group} was given another rank's part of {loaded.info.name}")
        join_ranks(loaded.module, portion, group)
        self.group = group
        self.vocab_size = loaded.info.vocab_size
        self._local = TorchRunner(loaded, arena, kernels=kernels)
        self._widths = portion.share.widths(self.vocab_size)
        barrier(group, ready_s)

    def check(self, plan: Plan) -> None:
        """Raises BrokenInvariant for a plan that no rank could compute."""
        if plan.rows:
            self._local.layout(plan)

    def compute(self, plan: Plan) -> torch.Tensor | None:
        """This rank's work of a step; float32 logits [N, V] at rank 0."""
        logits = self._local.launch(plan).logits_NV
        return logits if len(logits) == 0 else gather_columns(self.group, logits, self._widths)


class ShardedRunner:
    """The Runner (runner.py) of rank 0. Close it to send the other ranks home."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._leader = Leader(part.group)

    @property
    def vocab_size(self) -> int:
        return self._part.vocab_size

    def launch(self, plan: Plan) -> Flight:
        """Compute a plan; see runner.py. Raises PeerLost when a rank is gone: then nothing more can be computed."""
        if not plan.rows and not plan.moves:
            return Flight(plan, torch.empty(0, self.vocab_size))
        self._part.check(plan)  # before anyone is told: a rank that follows has nobody to complain to
        with self._leader.turn:
            self._leader.tell(plan)
            logits_NV = self._part.compute(plan)
        assert logits_NV is not None
        return Flight(plan, logits_NV)

    def close(self) -> None:
        """End the other ranks' `follow`."""
        self._leader.stop()


def follow(part: Part) -> None:
    """What a rank other than 0 does: compute what it is told until it is told to stop.

    Raises PeerLost when rank 0 (or another rank, in the middle of a step) is gone or frozen.
    """
    for plan in orders(part.group):
        part.compute(plan)
    part.group.close()
