"""Other processes for tests, met over real channels; none outlives the test."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import TracebackType

from cluster.parallel.channel import Channel
from cluster.parallel.groups import Rendezvous
from cluster.parallel.peer import PeerChannel, meet


class Peers:
    """Starts processes in a role of drafting_peer.py and meets them."""

    def __init__(self) -> None:
        self._rendezvous = Rendezvous.host()
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.kill()
            process.wait(10)
        self._rendezvous.close()

    def start(self, role: str, *rest: str) -> tuple[PeerChannel, subprocess.Popen[bytes]]:
        """Our end of a channel to a new process, and the process."""
        name, port = f"{role} {len(self._started)}", str(self._rendezvous.endpoint.port)
        process = subprocess.Popen([sys.executable, "-m", "tests.drafting_peer", role, port, name, *rest])
        self._started.append(process)
        return meet(self._rendezvous.endpoint, 0, name=name, meet_s=60.0), process


def take(channel: Channel, deadline_s: float = 10.0) -> bytes:
    """The next message, waited for."""
    bell = threading.Event()
    channel.listen(bell)
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        bell.clear()
        if (message := channel.poll()) is not None:
            return message
        bell.wait(0.5)
    raise AssertionError("nothing came")
