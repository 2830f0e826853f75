"""The kinds of devices a process may compute on; another kind, an NPU for example, is one more entry of KINDS.

Knows: what Ray calls a device, how its tensors travel between processes, what its libraries are told before
they start, and where on the machine the one a process was given sits.
Refuses to know: how many devices there are, and what is computed on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

SYSTEM = Path("/sys")


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """name: torch's. resource: Ray's name for it; None for what every process has.

    backend: of `groups.join`, for tensors on it.
    settings: environment of every process on such a device, unless the machine or the configuration says else.
    numa_node: the NUMA node of the first device this process sees, None where there is none or nobody knows;
    reads below the given directory, SYSTEM by default.
    """

    name: str
    resource: str | None
    backend: str
    settings: Mapping[str, str]
    numa_node: Callable[[Path], int | None]

    def __reduce__(self) -> tuple[Callable[[str], DeviceKind], tuple[str]]:
        return kind_of, (self.name,)  # travels by name: the other process knows it too


def kind_of(name: str) -> DeviceKind:
    """The kind torch calls so, such as "cpu"."""
    return KINDS[name]


def _no_node(system: Path) -> None:
    del system  # a CPU process is at home everywhere


def _cuda_node(system: Path) -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    facts: Any = torch.cuda.get_device_properties(0)
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the machine has one only, or does not tell


#: torch's watchdog would end the process of a verifier whose drafter is gone (its default, 3): groups.py notices
#: itself and gives the one group up. NVLink multicast buffers cost memory and start-up time in every small group.
_NCCL = MappingProxyType({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN"})

KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {
        "cpu": DeviceKind("cpu", None, "gloo", MappingProxyType({}), _no_node),
        "cuda": DeviceKind("cuda", "GPU", "nccl", _NCCL, _cuda_node),
    }
)
