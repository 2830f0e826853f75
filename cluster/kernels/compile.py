"""Turns one C++ source beside this file into a shared library, on first use, and keeps it for the next process.

Knows: the compiler, the flags every library needs, and where built ones are kept.
Refuses to know: what is in the source, and torch.

Without a compiler there is no library and the plain twin runs; OUTRIDER_NO_COMPILER=1 forces that.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# No contraction: a fused multiply-add would round differently from the twin.
_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off")
_COMPILE_SECONDS = 120


def compile_library(name: str, *included: str) -> ctypes.CDLL | None:
    """The library of `name`.cpp, which includes the files `included`; None where it cannot be built."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or os.environ.get("OUTRIDER_NO_COMPILER") == "1":
        return None
    try:
        path = _kept(name, included, compiler)
        if not path.exists():
            _build(compiler, Path(__file__).parent / f"{name}.cpp", path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None  # a broken compiler costs speed, never an answer


def _kept(name: str, included: tuple[str, ...], compiler: str) -> Path:
    """Where the library is kept: the name changes with the sources, the flags and the compiler."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30).stdout
    digest = hashlib.sha256(" ".join(_FLAGS).encode() + version)
    for source in (f"{name}.cpp", *included):
        digest.update((Path(__file__).parent / source).read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    directory = Path(base) / "outrider"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{name}-{digest.hexdigest()[:24]}.so"


def _build(compiler: str, source: Path, path: Path) -> None:
    """Compile and move into place, so that concurrent builders never see half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / "built.so"
        command = [compiler, *_FLAGS, str(source), "-o", str(built)]
        subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_SECONDS)
        built.rename(path)
