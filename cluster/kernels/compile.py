"""Turns one C++ source beside this file into a shared library, on first use, and keeps it for the next process.

Knows: the compiler, where built libraries are kept, and when a kept one may be used again.
Refuses to know: what is in a source, what its flags are for, and torch.

Without a compiler there is no library and the plain twin runs; OUTRIDER_NO_COMPILER=1 forces that,
to measure what the libraries bring.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_COMPILE_SECONDS = 300
_ALWAYS = ("-std=c++17", "-fPIC")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a source needs beside the flags all of them share."""

    # No contraction: a fused multiply-add would round differently from the twin.
    flags: tuple[str, ...] = ("-O2", "-ffp-contract=off")
    link: tuple[str, ...] = ()


#: For a source that computes exactly what its twin computes.
EXACT = Recipe()


def say_nothing() -> None:
    pass


def compile_library(
    name: str, *included: str, recipe: Recipe = EXACT, announce: Callable[[], None] = say_nothing
) -> ctypes.CDLL | None:
    """The library of `name`.cpp, which includes the files `included`; None where it cannot be built.

    announce: called before a compilation, which takes seconds, and not when a kept library is used.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or os.environ.get("OUTRIDER_NO_COMPILER") == "1":
        return None
    try:
        path = _directory() / f"{name}-{_identity(compiler, (f'{name}.cpp', *included), recipe)}.so"
        if not path.exists():
            announce()
            with _alone(path.parent):
                if not path.exists():
                    _build(compiler, Path(__file__).parent / f"{name}.cpp", path, recipe)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None  # a broken compiler costs speed, never an answer


def _directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    directory = Path(base) / "outrider"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _identity(compiler: str, sources: Sequence[str], recipe: Recipe) -> str:
    """Changes with the sources, the flags, the compiler and the instructions this CPU has."""
    digest = hashlib.sha256(repr((_ALWAYS, recipe)).encode())
    digest.update(subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30).stdout)
    for source in sources:
        digest.update((Path(__file__).parent / source).read_bytes())
    cpuinfo = Path("/proc/cpuinfo")  # homes are shared between machines, and what one compiled may not run on another
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        digest.update("".join(sorted({line for line in lines if line.startswith(("flags", "Features"))})).encode())
    return digest.hexdigest()[:24]


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One builder at a time, so that the ranks of one machine compile once.

    Only thrift hangs on it, as libraries are moved into place whole: where locks do not work or
    the holder takes too long, two build the same.
    """
    deadline = time.monotonic() + _COMPILE_SECONDS
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.1)
        yield
    finally:
        os.close(handle)  # and the lock with it


def _build(compiler: str, source: Path, path: Path, recipe: Recipe) -> None:
    """Compile, link and move into place, so that nobody ever loads half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unit, built = Path(scratch) / "unit.o", Path(scratch) / "built.so"
        for command in (
            [compiler, *_ALWAYS, *recipe.flags, "-c", str(source), "-o", str(unit)],
            [compiler, "-shared", str(unit), "-o", str(built), *recipe.link],
        ):
            subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_SECONDS)
        built.rename(path)
