"""What "auto" means, and how much memory is free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError
from cluster.model.device import (
    available_memory,
    cgroup_room,
    cpu_has_bfloat16,
    free_ram,
    resolve_device,
    resolve_dtype,
)

CPU = torch.device("cpu")


def test_devices_by_name() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:999", ""])
def test_devices_that_are_not_here_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        resolve_device(name)


def test_dtypes_by_name() -> None:
    assert resolve_dtype("float32", CPU, torch.bfloat16) == torch.float32
    assert resolve_dtype("float16", CPU, None) == torch.float16
    expected = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    assert resolve_dtype("auto", CPU, torch.float32) == expected
    with pytest.raises(ConfigError, match="int8"):
        resolve_dtype("int8", CPU, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu sse avx512_bf16 amx_bf16\n", True),
        ("flags : fpu amx_bf16\n", True),
        ("Features : fp asimd bf16\n", True),
        ("flags : fpu avx512f avx2\n", False),
        ("", False),
    ],
)
def test_bfloat16_is_read_from_the_cpu_flags(text: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_has_bfloat16(tmp_path / "cpuinfo") is expected


def test_a_machine_that_does_not_tell_its_flags_has_no_bfloat16(tmp_path: Path) -> None:
    assert cpu_has_bfloat16(tmp_path / "absent") is False


def test_free_memory_comes_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable: 300 kB\n")
    assert free_ram(tmp_path / "meminfo") == 300 * 1024
    assert free_ram(tmp_path / "absent") > 2**20
    assert 0 < available_memory(CPU) <= free_ram() * 2


def test_a_container_limit_counts_what_can_be_reclaimed_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert cgroup_room(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_room(tmp_path) is None
    assert cgroup_room(tmp_path / "absent") is None
