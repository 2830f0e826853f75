"""The engine's end of the wire: one JSON object a line in, one a line out.

Knows: the requests there are (load, run, memory), and that nothing but answers may reach the driver's pipe.
Refuses to know: any engine. Standard library only, so that it runs in whatever environment a peer lives in.

    {"op": "load", ...settings}                  {"version": "1.2", "versions": {...}}
    {"op": "run", "prompts": [[1, 2], ...],      {"answers": [{"tokens": [5, 6], "times": [[0.1, 1], [0.2, 1]]}],
     "tokens": 128, "end": [2], ...}              "seconds": 0.2}
    {"op": "memory"}                             {"peak": 123, "now": 100}          bytes, child processes included
    anything that fails                          {"error": "ValueError: ..."}

`times` of an answer: seconds from the submission of all prompts to each arrival, and how many tokens arrived.
`end` lists the token ids that end an answer; with "whole": true they do not, and every answer is as long as asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_PR_SET_PDEATHSIG = 1


def serve(module: ModuleType) -> int:
    """Answer the driver until it closes the pipe. The module has `load(settings)`, whose result has `run(ask)`."""
    _die_with_parent()
    with _own_output() as out:
        engine: Any = None
        for line in sys.stdin:
            ask = json.loads(line)
            try:
                if ask["op"] == "load":
                    engine = module.load(ask)
                    answer = {"versions": engine.versions}
                elif ask["op"] == "run":
                    answer = engine.run(ask)
                else:
                    answer = memory()
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(answer) + "\n")
            out.flush()
    # Engines leave threads and processes behind that nobody waits for: the driver ends what is left.
    os._exit(0)


def memory() -> dict[str, int]:
    """Bytes of this process and its descendants, pages they share counted once: now, and at their peaks."""
    peak, now = 0, 0
    for pid in (os.getpid(), *_descendants(os.getpid())):
        with contextlib.suppress(OSError, KeyError):  # it ended meanwhile
            status, shares = _told(f"/proc/{pid}/status"), _told(f"/proc/{pid}/smaps_rollup")
            now += shares["Pss"]
            peak += shares["Pss"] + status["VmHWM"] - status["VmRSS"]
    return {"peak": peak, "now": now}


def _told(path: str) -> dict[str, int]:
    """The lines `name: number kB` of a file, in bytes."""
    pairs = [line.split() for line in Path(path).read_text().splitlines()]
    return {pair[0].rstrip(":"): 1024 * int(pair[1]) for pair in pairs if len(pair) == 3 and pair[2] == "kB"}


def kept(tokens: list[int], end: list[int], whole: bool) -> list[int]:
    """The answer up to its first end token, that one included."""
    first = next((at for at, token in enumerate(tokens) if token in end and not whole), None)
    return tokens if first is None else tokens[: first + 1]


def arrivals(times: list[tuple[float, int]], count: int) -> list[tuple[float, int]]:
    """Arrivals of (seconds, tokens) of which only the first `count` tokens belong to the answer."""
    made = []
    for seconds, tokens in times:
        if (taken := min(tokens, count)) > 0:
            made.append((seconds, taken))
        count -= taken
    return made


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends its engines


@contextlib.contextmanager
def _own_output() -> Iterator[Any]:
    """The driver's pipe, kept from whatever an engine prints: that goes to standard error."""
    own = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(own, "w", encoding="utf-8") as out:
        yield out
