"""Real processes for tests of groups: each runs one task as one rank, and reports what came of it.

The tasks live in modules like this one, not in test modules: a child imports them by name.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from cluster.parallel.groups import Rendezvous

#: Forked from a clean process that has imported what is heavy: a child starts in milliseconds, and shares no thread
#: with pytest.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["cluster.build", "transformers.models.llama.modeling_llama"])

Task = Callable[..., Any]


class Crew:
    """`size` processes that run `task(endpoint, rank, size, *args)`; leaving the block kills what is left."""

    def __init__(self, size: int, task: Task, *args: Any) -> None:
        self._rendezvous = Rendezvous.host()
        self._reports: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_run, args=(there, task, (self._rendezvous.endpoint, rank, size, *args)), daemon=True
            )
            process.start()
            there.close()
            self._reports.append(here)
            self.processes.append(process)

    def report(self, rank: int, timeout: float = 60.0) -> Any:
        """The next thing a rank reports: what its task returned or yielded, or raises what it raised."""
        if not wait([self._reports[rank]], timeout):
            raise TimeoutError(f"rank {rank} reported nothing within {timeout} s")
        failed, value = self._reports[rank].recv()  # EOFError: the process died without a word
        if failed:
            raise value
        return value

    def reports(self, timeout: float = 60.0) -> list[Any]:
        return [self.report(rank, timeout) for rank in range(len(self.processes))]

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank; the time at which it was sent (monotonic, the same in all processes)."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        return time.monotonic()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self._rendezvous.close()


def _run(pipe: Connection, task: Task, args: tuple[Any, ...]) -> None:
    # A killed test run must not leave ranks waiting for each other.
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    try:
        result = task(*args)
        for value in result if isinstance(result, Generator) else [result]:
            pipe.send((False, value))
    except Exception as error:
        pipe.send((True, error))
