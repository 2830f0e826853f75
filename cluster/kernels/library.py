"""Builds the C++ kernels for this machine on first use, keeps them, and speaks their calling convention.

Knows: the compiler, the cache of built libraries, and the structures of kernels.cpp.
Refuses to know: models, and where the addresses it passes on come from.

The library shares torch's OpenMP runtime, hence its threads. Without a compiler there are no
kernels and the plain twins run; OUTRIDER_NO_COMPILER=1 forces that, to measure what they bring.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch

_SOURCES = ("simd.h", "team.h", "gemm.h", "attention.h", "kernels.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_COMPILE_SECONDS = 300
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class Linear(ctypes.Structure):
    _fields_: ClassVar = [("packed", _pointer), ("bias", _pointer), ("columns", _long), ("depth", _long)]


class Paged(ctypes.Structure):
    _fields_: ClassVar = [
        ("pages", _pointer),
        ("block_bytes", _long),
        ("block_tokens", _long),
        ("heads", _long),
        ("dim", _long),
        ("starts", _pointer),
        ("firsts", _pointer),
        ("tables", _pointer),
        ("rows", _long),
        ("width", _long),
        ("group", _long),
        ("scaling", _float),
        ("softcap", _float),
        ("window", _long),
        ("sinks", _pointer),
    ]


class Layer(ctypes.Structure):
    _fields_: ClassVar = [
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("before", _pointer),
        ("after", _pointer),
        ("query_norm", _pointer),
        ("key_norm", _pointer),
        ("epsilon", _float),
        ("scaling", _float),
        ("window", _long),
    ]


class Step(ctypes.Structure):
    _fields_: ClassVar = [
        ("layers", _pointer),
        ("num_layers", _long),
        ("layer_bytes", _long),
        ("paged", Paged),
        ("slots", _pointer),
        ("cosines", _pointer),
        ("sines", _pointer),
        ("rotary", _long),
        ("hidden", _long),
        ("num_tokens", _long),
        ("embedding", _pointer),
        ("tokens", _pointer),
        ("stream", _pointer),
        ("normed", _pointer),
        ("attended", _pointer),
        ("active", _pointer),
        ("projected", _pointer),
        ("head", Linear),
        ("norm", _pointer),
        ("epsilon", _float),
        ("wanted", _pointer),
        ("num_wanted", _long),
        ("logits", _pointer),
    ]


#: Entry points and their parameters; each exists for float32 and bfloat16.
_ENTRIES: dict[str, tuple[type, ...]] = {
    "step": (_int, _pointer),
    "project": (_int, _pointer, _pointer, _long, _long, _pointer, _pointer),
    "project_wide": (_int, _pointer, _pointer, _long, _long, _pointer, _pointer),
    "attend": (_int, _pointer, _pointer, _long, _long, _pointer),
    "pack": (_pointer, _long, _long, _pointer, _long, _long, _long),
}


class Library:
    """The kernels of this machine. `entry(name, dtype)` gives a C function; most take the number of threads first."""

    def __init__(self, path: Path) -> None:
        self._dll = ctypes.CDLL(str(path))

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device) -> bool:
        return dtype in _SUFFIXES and device.type == "cpu"

    def entry(self, name: str, dtype: torch.dtype) -> Callable[..., None]:
        function = getattr(self._dll, f"{name}_{_SUFFIXES[dtype]}")
        function.argtypes = _ENTRIES[name]
        function.restype = None
        call: Callable[..., None] = function
        return call


def open_library() -> Library | None:
    """The kernels, built if this machine has not built them before; None where that is impossible."""
    if os.environ.get("OUTRIDER_NO_COMPILER") == "1":
        return None
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    try:
        path = _cache_directory() / f"kernels-{_identity(compiler)}.so"
        if not path.exists():
            _build(compiler, path)
        return Library(path)
    except (OSError, subprocess.SubprocessError):
        return None  # a broken or missing compiler costs speed, never an answer


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    directory = Path(base) / "outrider"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _identity(compiler: str) -> str:
    """Changes with the sources, the flags, the compiler, the OpenMP runtime and the instructions this CPU has."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in _SOURCES:
        digest.update((Path(__file__).parent / source).read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30)
    digest.update(version.stdout)
    digest.update(" ".join(map(str, _openmp_runtime())).encode())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        digest.update("".join(sorted({line for line in lines if line.startswith(("flags", "Features"))})).encode())
    return digest.hexdigest()[:24]


def _openmp_runtime() -> list[Path]:
    """The OpenMP runtime that ships with torch, if it does: a second one would bring a second set of threads."""
    return sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]


def _build(compiler: str, path: Path) -> None:
    """Compile and move into place, so that concurrent builders never see half a library."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unit, built = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        runtime = _openmp_runtime()
        link = [*map(str, runtime), f"-Wl,-rpath,{runtime[0].parent}"] if runtime else ["-fopenmp"]
        for command in (
            [compiler, *_FLAGS, "-fopenmp", "-c", str(here / "kernels.cpp"), "-o", str(unit)],
            [compiler, "-shared", str(unit), "-o", str(built), *link],
        ):
            subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_SECONDS)
        built.rename(path)
