"""The C++ kernels of this machine and how they are called.

Knows: the flags they want, and the structures and entry points of kernels.cpp.
Refuses to know: models, where the addresses it passes on come from, and how libraries are kept (compile.py).

The library shares torch's OpenMP runtime, hence its threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch

from cluster.kernels.compile import Recipe, compile_library, say_nothing

_INCLUDED = ("simd.h", "team.h", "tiles.h", "levels.h", "gemm.h", "attention.h", "noise.h")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class Linear(ctypes.Structure):
    _fields_: ClassVar = [
        ("packed", _pointer),
        ("bias", _pointer),
        ("columns", _long),
        ("depth", _long),
        ("scales", _pointer),
        ("bits", _long),
    ]


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
        ("roots", _pointer),
        ("sights", _pointer),
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
        ("levels", _pointer),
        ("projected", _pointer),
        ("head", Linear),
        ("norm", _pointer),
        ("epsilon", _float),
        ("wanted", _pointer),
        ("num_wanted", _long),
        ("logits", _pointer),
    ]


#: Entry points and their parameters; each exists for float32 and bfloat16, but for `draw`: float32 alone.
_ENTRIES: dict[str, tuple[type, ...]] = {
    "step": (_int, _pointer),
    "project": (_int, _pointer, _pointer, _long, _long, _pointer, _pointer),
    "project_wide": (_int, _pointer, _pointer, _long, _long, _pointer, _pointer),
    "attend": (_int, _pointer, _pointer, _long, _long, _pointer),
    "draw": (_int, _pointer, _long, _pointer, _long, _long, _pointer, _pointer),
    "pack": (_pointer, _long, _long, _pointer, _long, _long, _long),
}


class Library:
    """The kernels of this machine. `entry(name, dtype)` gives a C function; most take the number of threads first."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._dll = dll

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device) -> bool:
        return dtype in _SUFFIXES and device.type == "cpu"

    def entry(self, name: str, dtype: torch.dtype) -> Callable[..., None]:
        function = getattr(self._dll, f"{name}_{_SUFFIXES[dtype]}")
        function.argtypes = _ENTRIES[name]
        function.restype = None
        call: Callable[..., None] = function
        return call


def open_library(announce: Callable[[], None] = say_nothing) -> Library | None:
    """The kernels, built if this machine has not built them before; None where that is impossible.

    announce: as in `compile_library`.
    """
    runtime = _openmp_runtime()
    link = (*map(str, runtime), f"-Wl,-rpath,{runtime[0].parent}") if runtime else ("-fopenmp",)
    dll = compile_library("kernels", *_INCLUDED, recipe=Recipe(_FLAGS, link), announce=announce)
    return None if dll is None else Library(dll)


def _openmp_runtime() -> list[Path]:
    """The OpenMP runtime that ships with torch, if it does: a second one would bring a second set of threads."""
    return sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]
