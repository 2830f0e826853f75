"""Which device and which number format a model runs in, and how much memory is free there.

Knows: what "auto" means on this machine.
Refuses to know: models; it is asked with names and answers with torch's words.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from cluster.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def resolve_device(name: str) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:N". auto: CUDA where there is one, else the CPU.

    Raises: ConfigError when the device does not exist here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N")
    # torch wraps an index above 127 to a negative one instead of refusing it.
    if device.type == "cuda" and not 0 <= (device.index or 0) < torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str, device: torch.device, config_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype for "auto", "float32", "bfloat16" or "float16".

    auto: bfloat16 where the device computes in it, unless the model is stored in float16 and the
    device is a GPU (then float16); else float32.
    Raises: ConfigError for another name.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise ConfigError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    if device.type == "cuda":
        if config_dtype == torch.float16:
            return torch.float16
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """True when the CPU multiplies bfloat16 in hardware; emulation would be slower than float32."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.partition(":")[2].split())


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`: free GPU memory, or RAM within the cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = free_ram()
    limit = cgroup_room()
    return free if limit is None else min(free, limit)


def free_ram(meminfo: Path = _MEMINFO) -> int:
    """Bytes the kernel could hand out without swapping; all of the RAM where it does not say."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_room(root: Path = _CGROUP) -> int | None:
    """Bytes left under the memory limit of this container (cgroup v2, else v1); None without a limit."""
    for limit_name, used_name, stat_name in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            limit = int((root / limit_name).read_text())
            used = int((root / used_name).read_text())
            stat = dict(line.split(maxsplit=1) for line in (root / stat_name).read_text().splitlines())
        except (OSError, ValueError):  # absent, or "max"
            continue
        # Clean file pages count as used but are given back on demand.
        reclaimable = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
        return max(0, limit - used + reclaimable)
    return None
