"""Who sits where: the processes of one engine, what each sets aside, and the nodes they would fit on.

Knows: the roles of processes and what the configuration wants for each; arithmetic over nodes.
Refuses to know: Ray, and what is free at this moment: it works with what it is told. The nodes' owner has
the last word; what is computed here beforehand says who a process is, and explains a refusal.

    seats      target 0 (plans and verifies), target 1.., then the dedicated drafters, draft by draft.
               Shared drafters have no seat: they belong to no engine.
    bundle     what a seat sets aside on its node, by the names Ray has for it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from cluster.config import EngineConfig
from cluster.config_drafts import DraftingConfig
from cluster.config_places import DraftPlace, Reservation
from cluster.errors import BrokenInvariant, CapacityError
from cluster.parallel.devices import DeviceKind, kind_of

#: A node that has accelerators of a type offers one of this for the type; each seat takes a sliver.
_TYPE = "accelerator_type:"
_SLIVER = 0.001
#: What is left of a resource after some was taken is compared with this much slack.
_DUST = 1e-6


class Role(Enum):
    """What a process does for its engine."""

    TARGET = "target"
    DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. resources: amounts by Ray's names, memory in bytes. address: where others reach it."""

    name: str
    resources: Mapping[str, float]
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Seat:
    """One process.

    index: the rank of a target, or the draft's position in `drafts`; copy: which of a draft's replicas.
    turn, sharers: it is the turn-th of so many processes of its engine that compute on their node's cores.
    environment: of the process, as configured, over what its kind of device wants.
    address: of its node.
    """

    role: Role
    index: int
    kind: DeviceKind
    bundle: Mapping[str, float]
    environment: Mapping[str, str]
    copy: int = 0
    turn: int = 0
    sharers: int = 1
    pin: bool = True
    threads: int | None = None
    address: str = "127.0.0.1"

    def __str__(self) -> str:
        who = f"target rank {self.index}" if self.role is Role.TARGET else f"drafter {self.copy} of drafts.{self.index}"
        return f"{who} ({told(self.bundle)})"


@dataclass(frozen=True, slots=True)
class Placement:
    """The seats of one engine. strategy: Ray's name for how far apart they may be."""

    seats: tuple[Seat, ...]
    strategy: str = field(default="PACK")

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [dict(seat.bundle) for seat in self.seats]

    @property
    def total(self) -> dict[str, float]:
        """What all seats set aside together."""
        return _sum(self.bundles)


def plan(config: EngineConfig, nodes: Sequence[Node]) -> Placement:
    """The seats of an engine. A device left to "auto" is a GPU where the nodes have as many as the target needs."""
    kind = target_kind(config, nodes)
    own = config.placement
    target = Seat(
        Role.TARGET,
        0,
        kind,
        _bundle(own, kind),
        own.environment,
        pin=own.pin,
        threads=config.target.threads,
    )
    seats = [replace(target, index=rank) for rank in range(config.target.tensor_parallel)]
    for index, draft in enumerate(config.drafts):
        if isinstance(draft, DraftingConfig) and draft.drafter.place == "dedicated":
            seat = _drafter_seat(config, index, draft.drafter, kind)
            seats.extend(replace(seat, copy=copy) for copy in range(draft.drafter.replicas))
    return Placement(tuple(seats), own.strategy.upper())


def plan_drafter(config: EngineConfig, index: int, nodes: Sequence[Node]) -> Placement:
    """The seat of one shared drafter of position `index` of `drafts`, which belongs to no engine."""
    draft = config.drafts[index]
    if not isinstance(draft, DraftingConfig):
        raise BrokenInvariant(f"drafts.{index} is of kind {draft.kind}, which has no model to give a process to")
    return Placement((_drafter_seat(config, index, draft.drafter, target_kind(config, nodes)),))


def _drafter_seat(config: EngineConfig, index: int, place: DraftPlace, target: DeviceKind) -> Seat:
    """target: the kind of device of its targets."""
    kind = target if place.device == "auto" else kind_of(place.device)
    return Seat(
        Role.DRAFTER,
        index,
        kind,
        _bundle(place, kind),
        config.placement.environment,
        pin=config.placement.pin,
        threads=place.threads,
    )


def target_kind(config: EngineConfig, nodes: Sequence[Node]) -> DeviceKind:
    """The kind of device the target computes on."""
    if config.target.device != "auto":
        return kind_of(config.target.device)
    there = sum(node.resources.get("GPU", 0.0) for node in nodes)
    wanted = config.target.tensor_parallel * config.placement.gpus
    return kind_of("cuda" if there + _DUST >= wanted else "cpu")


def seated(placement: Placement, nodes: Sequence[Node]) -> Placement:
    """The same, each seat knowing its node's address and who shares its cores. nodes: of the seats, in their order."""
    crowd: dict[str, list[int]] = {}
    seats = [replace(seat, address=node.address) for seat, node in zip(placement.seats, nodes, strict=True)]
    for number, (seat, node) in enumerate(zip(seats, nodes, strict=True)):
        if seat.kind.resource is None:
            crowd.setdefault(node.name, []).append(number)
    for numbers in crowd.values():
        for turn, number in enumerate(numbers):
            seats[number] = replace(seats[number], turn=turn, sharers=len(numbers))
    return replace(placement, seats=tuple(seats))


def assign(placement: Placement, nodes: Sequence[Node]) -> tuple[str, ...]:
    """A node for every seat, in the order of seats, within the nodes' resources and the strategy.

    The hungriest seats choose first; `pack` fills a node in use before another, `spread` takes the one
    with the fewest seats. Raises CapacityError with the numbers.
    """
    if placement.strategy == "STRICT_PACK":
        for node in nodes:
            chosen = _greedy(placement, [node], spread=False)
            if not isinstance(chosen, Seat):
                return chosen
        raise shortage(placement, nodes)
    chosen = _greedy(placement, nodes, spread=placement.strategy == "SPREAD")
    if isinstance(chosen, Seat):
        raise shortage(placement, nodes, chosen)
    return chosen


def shortage(placement: Placement, nodes: Sequence[Node], seat: Seat | None = None) -> CapacityError:
    """What to say when an engine's processes find no room: what is wanted, and what the nodes have."""
    wanted = told(placement.total)
    where = " on one node" if placement.strategy == "STRICT_PACK" else ""
    lines = [f"no room for {len(placement.seats)} processes: together they set aside {wanted}{where}"]
    lines.extend(f"  {each}" for each in placement.seats)
    lines.append("the nodes have" if nodes else "there are no nodes")
    lines.extend(f"  {node.name}: {told(node.resources, placement.total)}" for node in nodes)
    if seat is not None:
        lines.append(f"{seat} found none")
    lines.append("lower placement.cpus, placement.gpus, drafts[].drafter or target.tensor_parallel, or add nodes")
    return CapacityError("\n".join(lines))


def told(amounts: Mapping[str, float], only: Mapping[str, float] | None = None) -> str:
    """Amounts for people: "2 GPU, 1.5 CPU, 16.0 GiB memory"; only: leave out what is not in it."""
    names = [name for name in (only or amounts) if not name.startswith(_TYPE)]
    shown = [
        f"{amounts.get(name, 0.0) / 2**30:.1f} GiB memory" if name == "memory" else f"{amounts.get(name, 0.0):g} {name}"
        for name in sorted(names, key=lambda name: (name == "memory", name == "CPU", name))
    ]
    types = [name.removeprefix(_TYPE) for name in (only or amounts) if name.startswith(_TYPE) and name in amounts]
    return ", ".join(shown + ([f"type {' or '.join(types)}"] if types else []))


def _bundle(want: Reservation, kind: DeviceKind) -> dict[str, float]:
    bundle = {"CPU": want.cpus}
    if kind.resource is not None:
        bundle[kind.resource] = want.gpus
        if want.accelerator is not None:
            bundle[_TYPE + want.accelerator] = _SLIVER
    if want.memory_bytes:
        bundle["memory"] = float(want.memory_bytes)
    return bundle


def _greedy(placement: Placement, nodes: Sequence[Node], *, spread: bool) -> tuple[str, ...] | Seat:
    """A node for every seat, or the seat that found none."""
    free = {node.name: dict(node.resources) for node in nodes}
    held = dict.fromkeys(free, 0)
    chosen: dict[int, str] = {}
    seats = placement.seats
    for number in sorted(range(len(seats)), key=lambda each: _hunger(seats[each].bundle), reverse=True):
        bundle = seats[number].bundle
        fitting = [
            name
            for name, left in free.items()
            if all(left.get(what, 0.0) + _DUST >= amount for what, amount in bundle.items())
        ]
        if not fitting:
            return seats[number]
        name = min(fitting, key=lambda each: held[each] if spread else -held[each])
        for what, amount in bundle.items():
            free[name][what] -= amount
        held[name] += 1
        chosen[number] = name
    return tuple(chosen[number] for number in range(len(seats)))


def _hunger(bundle: Mapping[str, float]) -> tuple[float, float, float]:
    devices = sum(amount for what, amount in bundle.items() if what not in ("CPU", "memory"))
    return devices, bundle.get("CPU", 0.0), bundle.get("memory", 0.0)


def _sum(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for what, amount in bundle.items():
            total[what] = total.get(what, 0.0) + amount
    return total
