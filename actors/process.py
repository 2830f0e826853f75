"""What a process of an engine is before it computes: its environment, its cores, and how it says how far it is.

Knows: what has to be said before a tensor library starts, and how work runs beside an event loop.
Refuses to know: what is computed, and Ray.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from actors.loop import Phase, Progress
from cluster.config import EngineConfig
from cluster.errors import EngineStopped
from cluster.parallel.devices import SYSTEM
from cluster.parallel.numa import allowed_cores, home, keep_to, read_nodes, share_of_cores
from cluster.parallel.topology import Seat


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where two processes meet for a channel: a rendezvous that is bound already.

    backend: as for a group (parallel/groups.py), the same at both ends.
    """

    host: str
    port: int
    name: str
    backend: str = "gloo"


def take_seat(config: EngineConfig, seat: Seat) -> EngineConfig:
    """Make this process what its seat says; returns the configuration it works by, on its own device.

    Call it before a tensor library is imported: that is when the number of threads is read. Ray would
    limit an actor to as many as it has CPUs set aside, where the target wants its share of the cores.
    """
    os.environ.update(seat.environment)
    for name, value in seat.kind.settings.items():
        os.environ.setdefault(name, value)
    allowed = allowed_cores()
    cores = allowed
    if seat.pin:
        cores = home(read_nodes(), allowed, seat.kind.numa_node(SYSTEM), seat.turn, seat.sharers)
        keep_to(cores)
    threads = seat.threads or min(len(cores), share_of_cores(len(allowed), seat.sharers))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    here = {"device": seat.kind.name, "threads": threads}
    return config.model_copy(update={"target": config.target.model_copy(update=here)})


class Background:
    """Work on a thread of its own: it stands up, then runs until it is over.

    work: gets a callback for progress lines and one to say that it stands.
    """

    def __init__(self, work: Callable[[Callable[[str], None], Callable[[], None]], None], name: str) -> None:
        self._work = work
        self._name = name
        self._now = Progress(Phase.BUILDING, 0, 0.0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def progress(self) -> Progress:
        """Never waits."""
        return self._now

    def _run(self) -> None:
        try:
            self._work(self._report, self._stand)
            self._now = Progress(Phase.STOPPED, 0, 0.0, error=EngineStopped(f"{self._name} has ended"))
        except Exception as error:  # the actor's outermost loop: whoever waits for it must learn why it ended
            logging.getLogger(__name__).exception("%s ended on an error", self._name)
            self._now = Progress(Phase.CRASHED, 0, 0.0, error=error)

    def _report(self, line: str) -> None:
        self._now = Progress(Phase.BUILDING, 0, 0.0, line)

    def _stand(self) -> None:
        self._now = Progress(Phase.RUNNING, 0, 0.0)
