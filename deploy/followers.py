"""The other ranks of a tensor-parallel target as processes of this machine, without Ray.

Knows: how they are started, that they report what went wrong, and that they end with this process.
Refuses to know: what a rank computes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from types import TracebackType

from cluster.build_model import Meeting, assemble_shard
from cluster.config import EngineConfig
from cluster.errors import OutriderError, PeerLost
from cluster.parallel.groups import Rendezvous
from deploy.reaper import Reaper

_END_S = 5.0


class Followers:
    """Context manager: inside it, ranks 1.. of the target come to `meeting`; rank 0 is this process's to assemble.

    Close the engine before leaving: ranks that nobody sent home are killed after a moment.
    """

    def __init__(self, config: EngineConfig) -> None:
        ranks = config.target.tensor_parallel
        threads = config.target.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
        #: What every rank is built from: they share this machine's cores.
        self.config = config.model_copy(update={"target": config.target.model_copy(update={"threads": threads})})
        self._rendezvous = Rendezvous.host()
        self.meeting = Meeting(self._rendezvous.endpoint, watch=self._watch)
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self._reports: list[Connection] = []
        self._processes = []
        for rank in range(1, ranks):
            here, there = context.Pipe(duplex=False)
            arguments = (self.config, Meeting(self._rendezvous.endpoint), rank, there)
            process = context.Process(target=_follow, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            there.close()
            self._reports.append(here)
            self._processes.append(process)
        self._reaper = Reaper()
        self._reaper.note(self.pids)  # a rank that has not met anybody yet would not notice that this process is gone

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._processes if process.pid is not None]

    def _watch(self) -> None:
        for process, report in zip(self._processes, self._reports, strict=True):
            if report.poll():
                try:
                    raise report.recv()
                except EOFError:
                    process.join(_END_S)
                    raise PeerLost(f"{process.name} of the target ended with code {process.exitcode}") from None

    def __enter__(self) -> Followers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if error is None:
                process.join(_END_S)
            process.kill()
            process.join(_END_S)
        self._reaper.note(())
        self._reaper.close()
        self._rendezvous.close()


def _follow(config: EngineConfig, meeting: Meeting, rank: int, report: Connection) -> None:
    """The life of one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    try:
        assemble_shard(config, meeting, rank).follow()
    except OutriderError as error:
        report.send(error)
