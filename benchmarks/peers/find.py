"""Where peers are installed, and what is missing where they are not.

Knows: the documented places: --peer-python, .venv-PEER beside the project or here, the interpreter that runs us; and
what a peer's process needs in its environment.
Refuses to know: how a peer is driven.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.arguments import PEERS
from cluster.errors import ConfigError

#: What a peer's interpreter must be able to import.
MODULES: Mapping[str, str] = {"vllm": "vllm", "transformers": "transformers", "llama.cpp": "llama_cpp"}
_ROOT = Path(__file__).resolve().parent.parent.parent
_LOOK_S = 60.0


@dataclass(frozen=True)
class Missing:
    """Why a peer cannot take part, and what to do about it."""

    why: str


def given(pairs: Sequence[str], option: str, known: Sequence[str]) -> dict[str, Path]:
    """NAME=PATH pairs of an option. Raises ConfigError for a name that is not `known` or a file that is not there."""
    made = {}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if name not in known or not path:
            raise ConfigError(f"{option} {pair}: must be NAME=PATH with a name among {', '.join(known)}")
        if not Path(path).expanduser().is_file():
            raise ConfigError(f"{option} {pair}: there is no file {path}")
        made[name] = Path(path).expanduser().absolute()  # not resolved: a venv's python is a link
    return made


def interpreter(peer: str, named: Mapping[str, Path]) -> Path | Missing:
    """The interpreter that has `peer`; "outrider" is found here."""
    if peer not in PEERS:
        return Path(sys.executable)
    module, tried = MODULES[peer], []
    own = [folder / f".venv-{peer}" / "bin" / "python" for folder in dict.fromkeys((Path.cwd(), _ROOT))]
    for python in [named[peer]] if peer in named else [path for path in own if path.is_file()]:
        if _has(python, module):
            return python
        tried.append(f"{python} cannot find {module}")
    if peer not in named and importlib.util.find_spec(module) is not None:
        return Path(sys.executable)
    places = tried or [f"no .venv-{peer}/bin/python here, and this interpreter has no {module}"]
    return Missing(f"{'; '.join(places)}. Name one with --peer-python {peer}=PYTHON (docs/benchmarks.md)")


def environment(peer: str, python: Path, threads: int) -> dict[str, str]:
    """For a process of `peer`: no network, so many threads, and nothing of our own import path in a peer's."""
    made = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": f"{threads}",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if peer != "outrider":
        made.pop("PYTHONPATH", None)
    if peer == "vllm":
        # Its default sets one core aside for serving and computes on the rest: with two cores, on one.
        cores = sorted(os.sched_getaffinity(0))[:threads]
        made |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_NO_USAGE_STATS": "1"}
        openmp = python.parent.parent / "lib" / "libiomp5.so"  # its documentation preloads the one it installs
        if openmp.is_file():
            made["LD_PRELOAD"] = f"{openmp}"
    return made


def _has(python: Path, module: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", look], capture_output=True, timeout=_LOOK_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
