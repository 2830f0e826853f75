"""Ends what a killed process leaves behind.

Knows: which processes descend from its owner, and that a closed pipe means the owner is gone.
Refuses to know: what those processes are.

Ray ends its own processes when the one that started them is killed, but its node agents first try
for a minute to report the loss to a service that died with it. The reaper is a tiny child that
outlives its owner by a moment: the owner names its descendants every few seconds, and whatever of
them is still there when the pipe closes is killed. A process is its id and its start time, so an
id that was used again is never hit. Linux only, as Ray's own mechanism is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

Process = tuple[int, int]  # process id, start time in clock ticks since boot


class Reaper:
    """The owner's side."""

    def __init__(self) -> None:
        # Its own session: Ctrl-C at the terminal is for the owner, and the reaper must come last.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def note(self, only: Collection[int] | None = None) -> None:
        """Tell the reaper which processes descend from this one now; with `only`, which of these."""
        found = [(pid, start) for pid, start in descendants(os.getpid()) if pid != self._child.pid]
        names = " ".join(f"{pid}:{start}" for pid, start in found if only is None or pid in only)
        stdin = self._child.stdin
        if stdin is not None:
            with contextlib.suppress(OSError):  # somebody killed the reaper: nothing hangs on it
                stdin.write(f"{names}\n".encode())
                stdin.flush()

    def close(self) -> None:
        """Let the reaper do its work and end; call it when everything should have ended by itself."""
        if self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(5.0)


def descendants(root: int) -> list[Process]:
    """Every living process below `root`, itself not included."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            stat = _stat(int(entry))
            if stat is not None:
                parent, start = stat
                children.setdefault(parent, []).append((int(entry), start))
    found: list[Process] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.extend(below)
        waiting.extend(pid for pid, _ in below)
    return found


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start time) of a process; None when it is gone or only waits to be collected."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[1]), int(fields[19]))


def main() -> None:
    """Read lines of `pid:start ...`; when there are no more, kill what the last one named."""
    named: list[Process] = []
    for line in sys.stdin:
        named = [(int(pid), int(start)) for pid, start in (entry.split(":") for entry in line.split())]
    for pid, start in named:
        stat = _stat(pid)
        if stat is not None and stat[1] == start:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
