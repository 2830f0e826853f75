"""Drafters behind channels that lose, double, delay and reorder, in one process and without threads.

The verifier's end is polled by the proposer; polling lets the drafter at the other end read and work first, so
that a schedule is a function of its seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cluster.draft.proposer import Proposer
from cluster.draft.remote import RemoteProposer
from cluster.draft.server import DraftServer, Strategy, Sync
from cluster.parallel.channel import Channel, local_pair

MakeStrategy = Callable[[Proposer], Strategy]


@dataclass(frozen=True)
class Faults:
    """Chances, for each message: never sent; sent twice; held back for up to `most` sends; put before the last one."""

    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    swap: float = 0.0
    most: int = 6


NONE = Faults()
WILD = Faults(lose=0.15, double=0.2, delay=0.25, swap=0.2)


@dataclass
class FaultyChannel:
    """Another channel's end whose sends go wrong."""

    inner: Channel
    faults: Faults
    random: np.random.Generator
    held: list[tuple[int, bytes]] = field(default_factory=list)
    waiting: list[bytes] = field(default_factory=list)

    def send(self, message: bytes) -> None:
        faults, chance = self.faults, self.random.random
        copies = 0 if chance() < faults.lose else 2 if chance() < faults.double else 1
        for _ in range(copies):
            delay = int(self.random.integers(1, faults.most + 1)) if chance() < faults.delay else 0
            self.held.append((delay, message))
        due = [message for left, message in self.held if left <= 0]
        self.held = [(left - 1, message) for left, message in self.held if left > 0]
        for each in due:
            at = -1 if self.waiting and chance() < faults.swap else len(self.waiting)
            self.waiting.insert(at, each)

    def flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        for message in waiting:
            self.inner.send(message)

    def poll(self) -> bytes | None:
        return self.inner.poll()

    def listen(self, bell: threading.Event) -> None:
        self.inner.listen(bell)

    def close(self) -> None:
        self.inner.close()


@dataclass
class PumpedChannel:
    """The verifier's end: before it looks, what was sent crosses and the drafter works, `steps` times at most."""

    here: FaultyChannel
    there: FaultyChannel
    server: DraftServer
    steps: int = 50

    def send(self, message: bytes) -> None:
        self.here.send(message)

    def poll(self) -> bytes | None:
        self.here.flush()
        for _ in range(self.steps):
            if not self.server.step():
                break
        self.there.flush()
        return self.here.poll()

    def listen(self, bell: threading.Event) -> None:
        self.here.listen(bell)

    def close(self) -> None:
        self.here.close()
        self.server.step()


def timeless(kind: Callable[..., Strategy]) -> MakeStrategy:
    """A strategy for which no time passes: how far it drafts does not hang on this machine."""
    return lambda proposer: kind(proposer, clock=lambda: 0.0)


def pumped(server: DraftServer, faults: Faults = NONE, seed: int = 0, steps: int = 50) -> PumpedChannel:
    """The verifier's end of a new channel to `server`."""
    random = np.random.default_rng(seed)
    ours, theirs = local_pair()
    there = FaultyChannel(theirs, faults, random)
    server.attach(there)
    return PumpedChannel(FaultyChannel(ours, faults, random), there, server, steps)


def remote(
    *inner: Proposer, strategy: MakeStrategy = Sync, faults: Faults = NONE, seed: int = 0, steps: int = 50
) -> RemoteProposer:
    """A proposer whose drafting is done by `inner`, each behind a channel of its own."""
    proposer = RemoteProposer(inner[0].name, wait_s=0.0)
    for number, each in enumerate(inner):
        server = DraftServer(each, strategy(each), first_round=1 + number * 10**6)
        proposer.attach(pumped(server, faults, seed + number, steps))
    return proposer
