"""What this machine is, as far as it decides speed.

Knows: whom to ask about processors, memory, devices, libraries, and how fast memory is read.
Refuses to know: models.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from cluster.kernels.library import open_library
from cluster.model.device import available_memory, cpu_has_bfloat16

_PACKAGES = ("torch", "transformers", "ray")
#: Bytes read to measure bandwidth: beyond every cache, and a small part of what is free.
_READ_BYTES = 512 * 2**20
_READS = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts for people, and the bytes a second the device's memory gives."""

    facts: tuple[tuple[str, str], ...]
    bandwidth: float


def examine(device: torch.device) -> Machine:
    """Ask this machine about itself; takes a second or two."""
    facts = [("system", platform.platform()), ("python", platform.python_version()), *_versions(), *_processor()]
    for index in range(torch.cuda.device_count()):
        facts.append((f"gpu {index}", _gpu(index)))
    if torch.cuda.device_count():
        facts.append(("nccl", ".".join(map(str, torch.cuda.nccl.version()))))
        facts.extend(_pairs(torch.cuda.device_count()))
    bandwidth = read_bandwidth(device)
    facts.append(("memory free", f"{available_memory(device) / 2**30:.1f} GiB on {device}"))
    facts.append(("memory read", f"{bandwidth / 1e9:.1f} GB/s on {device}, {torch.get_num_threads()} threads"))
    return Machine(tuple(facts), bandwidth)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second at which one large tensor is summed: the best of a few goes."""
    count = min(_READ_BYTES, available_memory(device) // 8) // 4
    numbers = torch.ones(count, device=device)
    best = float("inf")
    for _ in range(_READS):
        began = time.perf_counter()
        float(numbers.sum())
        best = min(best, time.perf_counter() - began)
    return count * 4 / best


def _versions() -> list[tuple[str, str]]:
    found = []
    for package in _PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            found.append((package, "not installed"))
    return found


def _processor() -> list[tuple[str, str]]:
    cores = len(os.sched_getaffinity(0))
    busy = os.getloadavg()[0]
    kernels = "built" if open_library() is not None else "not built: no C++ compiler, steps run in plain torch"
    bfloat16 = "multiplied in hardware" if cpu_has_bfloat16() else "emulated: float32 is used"
    return [
        ("processor", _model_name()),
        ("cores", f"{cores} for this process; load {busy:.1f}"),
        ("bfloat16", bfloat16),
        ("kernels", kernels),
    ]


def _model_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return (
        f"{properties.name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, "
        f"{properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
    )


def _pairs(count: int) -> list[tuple[str, str]]:
    """Every ordered pair of devices: whether it copies directly, and how fast."""
    facts = []
    for source in range(count):
        for to in range(count):
            if source != to:
                direct = "direct" if torch.cuda.can_device_access_peer(source, to) else "by way of the host"
                facts.append((f"gpu {source} to {to}", f"{_copy_bandwidth(source, to) / 1e9:.0f} GB/s, {direct}"))
    return facts


def _copy_bandwidth(source: int, to: int) -> float:
    block = torch.empty(_READ_BYTES // 4, dtype=torch.uint8, device=f"cuda:{source}")
    target = torch.empty_like(block, device=f"cuda:{to}")
    best = float("inf")
    for _ in range(_READS):
        torch.cuda.synchronize(source)
        began = time.perf_counter()
        target.copy_(block)
        torch.cuda.synchronize(to)
        best = min(best, time.perf_counter() - began)
    return block.numel() / best
