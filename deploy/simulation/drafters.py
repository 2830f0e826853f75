"""Draft devices that are only emulated: each a process of its own behind a real channel.

Knows: how such a process is started, what it drafts with, how it is killed, and that it never outlives its parent.
Refuses to know: the engine it drafts for.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from cluster.draft.lookahead import Lookahead, Pearl
from cluster.draft.model import ModelProposer
from cluster.draft.remote import RemoteProposer
from cluster.draft.server import DraftServer, Strategy, Sync
from cluster.parallel.groups import Endpoint, Rendezvous
from cluster.parallel.peer import PeerChannel, meet
from deploy.simulation.parts import emulated_draft, script_of
from deploy.simulation.scenario import Mode, Scenario

#: How long a drafter may take to start and to end, in seconds.
_MEET_S, _END_S = 60.0, 5.0
#: How often a drafter looks whether its verifier is still there, in seconds.
_LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1


class Drafters:
    """The drafters of one engine."""

    def __init__(self, processes: list[BaseProcess]) -> None:
        self._processes = processes

    def kill(self) -> None:
        """All of them, at once and without a word."""
        for process in self._processes:
            process.kill()


@contextmanager
def started(scenario: Scenario, mode: Mode, lanes: int, remote: RemoteProposer) -> Iterator[Drafters]:
    """`scenario.drafters` processes, attached to `remote`; they end with the block."""
    # A server of forks has the libraries imported once; drafters are made from it in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    meeting = Rendezvous.host()
    processes: list[BaseProcess] = []
    channels: list[PeerChannel] = []
    try:
        for number in range(scenario.drafters):
            name = f"drafter {number}"
            drafter = context.Process(target=_draft, args=(scenario, mode, lanes, meeting.endpoint, name), daemon=True)
            drafter.start()
            processes.append(drafter)
            channels.append(meet(meeting.endpoint, 0, name=name, meet_s=_MEET_S))
            remote.attach(channels[-1])
        yield Drafters(processes)
    finally:
        remote.detach()
        meeting.close()
        for channel in channels:
            channel.wait_closed(_END_S)
        for process in processes:
            process.join(_END_S)
            process.kill()
            process.join(_END_S)


def _draft(scenario: Scenario, mode: Mode, lanes: int, endpoint: Endpoint, name: str) -> None:
    """The life of a drafter process: until its verifier leaves it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its drafters
    proposer = emulated_draft(scenario, script_of(scenario, lanes))
    server = DraftServer(proposer, _STRATEGIES[mode](scenario, proposer))
    channel = meet(endpoint, 1, name=name, meet_s=_MEET_S)
    server.attach(channel)
    stop = threading.Event()
    drafting = threading.Thread(target=server.run, args=(stop,))
    drafting.start()
    while server.verifiers:
        time.sleep(_LOOK_S)
    stop.set()
    drafting.join()
    channel.wait_closed(_END_S)


_STRATEGIES: Mapping[Mode, Callable[[Scenario, ModelProposer], Strategy]] = {
    "sync": lambda _, proposer: Sync(proposer),
    "lookahead": lambda scenario, proposer: Lookahead(proposer, budget=scenario.budget, most_rows=scenario.most_rows),
    "pearl": lambda _, proposer: Pearl(proposer),
}
