"""Which cores lie beside which memory, and which of them a process should keep to.

Knows: how the system describes its NUMA nodes.
Refuses to know: devices, and whose process it is.

A process that stays on the cores of one node gets its memory there as well: the system hands out pages
where they are first touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.parallel.devices import SYSTEM


@dataclass(frozen=True, slots=True)
class NumaNode:
    """number: the system's. cores: its CPUs."""

    number: int
    cores: frozenset[int]


def read_nodes(system: Path = SYSTEM) -> tuple[NumaNode, ...]:
    """The machine's NUMA nodes that have cores, by number; none where the system does not tell."""
    nodes = []
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        try:
            cores = parse_cores((folder / "cpulist").read_text())
        except OSError:
            continue
        if cores:
            nodes.append(NumaNode(int(folder.name.removeprefix("node")), cores))
    return tuple(sorted(nodes, key=lambda node: node.number))


def parse_cores(text: str) -> frozenset[int]:
    """The cores in a list such as "0-3,8-11"."""
    cores: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def home(
    nodes: Sequence[NumaNode], allowed: frozenset[int], device_node: int | None, turn: int, sharers: int
) -> frozenset[int]:
    """The cores a process keeps to, never empty unless `allowed` is.

    Beside its device where that is known. A process without a device is the `turn`-th of `sharers` that
    this engine has on the machine: they are dealt to the nodes in turn when there is one for every node,
    and otherwise may use them all.
    """
    usable = [node for node in nodes if node.cores & allowed]
    if device_node is not None:
        chosen = next((node for node in usable if node.number == device_node), None)
    else:
        chosen = usable[turn % len(usable)] if 1 < len(usable) <= sharers else None
    return allowed if chosen is None else chosen.cores & allowed


def share_of_cores(cores: int, sharers: int) -> int:
    """Threads for one of `sharers` processes on so many cores."""
    return max(1, cores // max(1, sharers))


def allowed_cores() -> frozenset[int]:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def keep_to(cores: frozenset[int]) -> None:
    """Keep this thread, and every thread it starts from now on, to these cores."""
    if cores and cores != allowed_cores() and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
