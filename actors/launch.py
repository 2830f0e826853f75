"""Starts the processes of an engine where they belong, waits until they can work, and ends them together.

Knows: Ray's ways of placing, naming and watching actors.
Refuses to know: what the actors compute, and who sits where (cluster/parallel/topology.py). The only file
that turns a class into an actor.

    Crew   one placement group, all or nothing
             verifier = target 0     shards = target 1..     drafters, each with a keeper (supervisor.py)

The processes are owned by whoever starts the crew and end with it, however it ends. So does the group where
the owner is a detached actor, as Serve's replicas are; otherwise Ray keeps the group until the owner's job ends.
A drafter that dies is replaced where it sat, while the engine goes on. A shard that dies ends the engine's
loop within milliseconds; the verifier is then unwell, its owner ends, and the crew is replaced as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.asking import ASK_S, ask, wait_ready
from actors.drafter import Drafter
from actors.lead import VerifierProcess
from actors.loop import Phase
from actors.shard import Shard
from actors.supervisor import Borrower, Keeper
from cluster.config import EngineConfig
from cluster.errors import CapacityError, PeerLost
from cluster.parallel.topology import Node, Placement, Role, Seat, plan, plan_drafter, seated, shortage, told

Report = Callable[[str], None]
Loan = tuple[int, Callable[[], AsyncGenerator[Any, None]]]

#: Named actors of this prefix are verifiers; whoever waits for one can ask it for its progress.
VERIFIER_PREFIX = "outrider-verifier-"


@dataclass(slots=True)
class Crew:
    """The processes of one engine. Keep it as long as the engine is to live."""

    verifier: Any
    group: PlacementGroup
    shards: list[Any] = field(default_factory=list)
    keepers: list[Keeper] = field(default_factory=list)
    borrowers: list[Borrower] = field(default_factory=list)

    @staticmethod
    async def start(config: EngineConfig, name: str, report: Report, loans: Sequence[Loan] = ()) -> Crew:
        """Start an engine's processes; returns when all of them can work.

        name: of the verifier among Ray's actors. loans: of shared drafters, each with its position in `drafts`.
        Raises CapacityError when there is no room within `placement.wait_s`, and what building any of them raised.
        """
        nodes = await asyncio.to_thread(cluster_nodes)
        group, placement = await make_room(config, plan(config, nodes), name, report)
        crew: Crew | None = None
        try:
            seats = list(enumerate(placement.seats))
            crew = Crew(_actor(VerifierProcess, group, 0, seats[0][1], VERIFIER_PREFIX + name, config), group)
            for number, seat in seats[1:]:
                if seat.role is Role.TARGET:
                    crew.shards.append(_actor(Shard, group, number, seat, "", config))
                else:
                    crew.keepers.append(_keeper(crew.verifier, seats[0][1], config, group, number, seat))
            crew.borrowers.extend(Borrower(lend, crew.verifier, index) for index, lend in loans)
            await crew._wait_ready(report)
        except BaseException:
            if crew is None:
                remove_placement_group(group)
            else:
                crew.end()
            raise
        return crew

    async def _wait_ready(self, report: Report) -> None:
        if self.shards:
            place = await ask(self.verifier.meeting.remote(), ASK_S)
            await asyncio.gather(*(ask(shard.follow.remote(place), ASK_S) for shard in self.shards))
        standing = [asyncio.ensure_future(wait_ready(self.verifier, report))]
        for rank, shard in enumerate(self.shards, start=1):
            standing.append(asyncio.ensure_future(wait_ready(shard, _silent, what=f"rank {rank} of the target")))
        standing.extend(asyncio.ensure_future(keeper.stand(report)) for keeper in self.keepers)
        try:
            await asyncio.gather(*standing)  # the first that fails says why
        finally:
            for each in standing:
                each.cancel()
        await asyncio.gather(*(keeper.start() for keeper in self.keepers))
        for borrower in self.borrowers:
            borrower.start()

    async def check(self, deadline_s: float) -> None:
        """Health is forward progress, and ranks that follow. Raises EngineStopped, PeerLost."""
        await ask(self.verifier.check_health.remote(), deadline_s)
        states = await asyncio.gather(*(ask(shard.progress.remote(), deadline_s) for shard in self.shards))
        for rank, now in enumerate(states, start=1):
            if now.phase is not Phase.RUNNING:
                raise PeerLost(f"rank {rank} of the target {now.phase.value}: {now.error!r}")

    def end(self) -> None:
        """Kill every process and give the room back."""
        for keeper in self.keepers:
            keeper.end()
        for borrower in self.borrowers:
            borrower.end()
        for actor in (*self.shards, self.verifier):
            ray.kill(actor)
        remove_placement_group(self.group)


@dataclass(slots=True)
class Lone:
    """A drafter of no engine, with room of its own. Keep it as long as it is to live."""

    drafter: Any
    group: PlacementGroup

    @staticmethod
    async def start(config: EngineConfig, index: int, name: str, report: Report) -> Lone:
        """Start what drafts for position `index` of `drafts`; returns when it can work. Raises as Crew.start."""
        nodes = await asyncio.to_thread(cluster_nodes)
        group, placement = await make_room(config, plan_drafter(config, index, nodes), name, report)
        drafter = _actor(Drafter, group, 0, placement.seats[0], "", config)
        try:
            await wait_ready(drafter, report, what=f"the drafter of drafts.{index}")
        except BaseException:
            ray.kill(drafter)
            remove_placement_group(group)
            raise
        return Lone(drafter, group)


async def make_room(
    config: EngineConfig, placement: Placement, name: str, report: Report
) -> tuple[PlacementGroup, Placement]:
    """A placement group with a bundle for every seat. Raises CapacityError with the numbers."""
    wait_s = config.placement.wait_s
    report(f"waiting for room for {len(placement.seats)} processes")
    group = placement_group(placement.bundles, strategy=placement.strategy, name=f"outrider-{name}")
    if not await asyncio.to_thread(group.wait, wait_s):
        free = told(await asyncio.to_thread(ray.available_resources), placement.total)
        nodes = await asyncio.to_thread(cluster_nodes)
        remove_placement_group(group)
        refused = shortage(placement, nodes)
        raise CapacityError(f"{refused}\nwaited {wait_s:.0f} s; free at the end, all nodes together: {free}")
    by_name = {node.name: node for node in await asyncio.to_thread(cluster_nodes)}
    placed = placement_group_table(group)["bundles_to_node_id"]
    return group, seated(placement, [by_name[placed[number]] for number in range(len(placement.seats))])


def cluster_nodes() -> list[Node]:
    """The living nodes, as Ray reports them."""
    return [
        Node(entry["NodeID"], entry["Resources"], entry["NodeManagerAddress"])
        for entry in ray.nodes()
        if entry["Alive"]
    ]


def _keeper(verifier: Any, lead: Seat, config: EngineConfig, group: PlacementGroup, number: int, seat: Seat) -> Keeper:
    whole_gpus = all(each.kind.backend == "nccl" and each.bundle["GPU"] == 1 for each in (lead, seat))
    backend = "nccl" if whole_gpus else "gloo"  # two ranks of NCCL cannot share a card
    return Keeper(lambda: _actor(Drafter, group, number, seat, "", config), verifier, seat.index, backend)


def _actor(kind: type, group: PlacementGroup, number: int, seat: Seat, name: str, config: EngineConfig) -> Any:
    """Start an actor in its bundle; returns its handle at once. It ends with whoever holds the handle.

    It is never restarted by Ray: an engine without its requests is of no use, and a drafter has to be
    paired anew.
    """
    return (
        ray.remote(kind)
        .options(
            num_cpus=seat.bundle["CPU"],
            num_gpus=seat.bundle.get("GPU", 0),
            name=name or None,
            max_restarts=0,
            max_concurrency=10_000,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
        )
        .remote(config, seat)
    )


def _silent(line: str) -> None:
    """Rank 0 speaks for all."""
