"""A contender's process: started, asked, measured, ended.

Knows: pipes, deadlines, that one who dies or keeps silent is out, with the last thing it said.
Refuses to know: what is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from cluster.errors import OutriderError
from deploy.reaper import Reaper, descendants

_ENGINES = Path(__file__).resolve().parent / "engines"
#: Longest to wait for an answer: loading may compile, a run may be long.
LOAD_S, RUN_S, END_S = 600.0, 300.0, 5.0
_TICK = os.sysconf("SC_CLK_TCK")


class EngineLost(OutriderError):
    """An engine's process ended, said nothing in time, or said that it cannot."""


class EngineProcess:
    """One engine behind a pipe. Use as a context manager: leaving it, and dying, ends the process and its children."""

    def __init__(self, python: Path, engine: str, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._child = subprocess.Popen(
                [python, _ENGINES, engine],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for us
            )
        self._reaper = Reaper()
        self._reaper.note(self._pids())

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        """The engine's answer. Raises EngineLost, and the process is ended then."""
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            line = self._line(stdout.fileno(), wait_s)
        except TimeoutError:
            raise self._lost(f"gave no answer within {wait_s:.0f} s") from None
        except (OSError, ValueError):  # its end of the pipe is closed, or ours after it was lost
            line = b""
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(END_S)  # the pipe closes a moment before the process is gone
            raise self._lost(f"ended with code {self._child.poll()}")
        self._reaper.note(self._pids())  # it may have children by now
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.close()
            raise EngineLost(f"{answer['error']}; more in {self._log}")
        return answer

    def load(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Versions of what it loaded."""
        versions: dict[str, str] = self.ask({"op": "load", **settings}, LOAD_S)["versions"]
        return versions

    def run(self, **request: Any) -> dict[str, Any]:
        return self.ask({"op": "run", **request}, RUN_S)

    def memory(self) -> dict[str, int]:
        return self.ask({"op": "memory"}, RUN_S)

    def pause(self) -> None:
        """Stop it and its children until `resume`: some engines poll while they wait."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """Processor seconds it and its children have used so far."""
        total = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / _TICK

    def close(self) -> None:
        """End it and all that descends from it. May be called twice."""
        self.resume()
        if self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(END_S)
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait(END_S)
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._reaper.close()  # whatever it left behind

    def _lost(self, state: str) -> EngineLost:
        self.close()
        return EngineLost(f"{state}; {self._last_words()}")

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids() if self._child.poll() is None else ():
            with contextlib.suppress(OSError):  # it ended meanwhile
                os.kill(pid, number)

    def _pids(self) -> list[int]:
        return [self._child.pid, *(pid for pid, _ in descendants(self._child.pid))]

    def _line(self, pipe: int, wait_s: float) -> bytes:
        """One line, or nothing where the pipe closes. Raises TimeoutError when the time is over."""
        until, got = time.monotonic() + wait_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not got.endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                if not (chunk := os.read(pipe, 1 << 20)):
                    return b""
                got += chunk
        return got

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        said = f"its last line: {lines[-1].strip()[:200]}" if lines else "it said nothing"
        return f"{said} (all in {self._log})"
