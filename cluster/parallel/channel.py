"""Two ends that send each other messages: bytes go in, the same bytes come out, or nothing does.

Knows: the verbs of a channel, and the pair of ends that lie in one process.
Refuses to know: what the bytes say, who speaks, and how they cross to another process (peer.py).

Nothing here waits: `send` hands over and returns, `poll` looks and returns. Who wants to sleep until
something arrives listens with an event and sleeps on that, on any number of channels at once.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from cluster.errors import PeerLost


class Channel(Protocol):
    """One end. Messages may be lost with the peer, never torn."""

    def send(self, message: bytes) -> None:
        """Hand one message over, without waiting for the peer. Raises PeerLost once the peer is known to be gone."""

    def poll(self) -> bytes | None:
        """The next message, or None where none has arrived.

        Raises PeerLost once the peer is gone or either end was closed and everything that arrived has been read.
        """

    def listen(self, bell: threading.Event) -> None:
        """Set `bell` whenever a message arrives or the peer is lost; and now, if that has happened already."""

    def close(self) -> None:
        """Leave; the other end is told. Never hangs; may be called twice."""


class Inbox:
    """What has arrived at one end, and whether more can. Filled from any thread, read from one."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._bell: threading.Event | None = None
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        """Why nothing more can arrive; None while something can."""
        return self._lost

    def put(self, message: bytes) -> None:
        self._messages.append(message)
        self._ring()

    def lose(self, why: str) -> None:
        """Nothing more arrives. The first reason stays."""
        self._lost = self._lost or why
        self._ring()

    def take(self) -> bytes | None:
        """As `Channel.poll`."""
        if self._messages:
            return self._messages.popleft()
        if self._lost is not None:
            raise PeerLost(self._lost)
        return None

    def listen(self, bell: threading.Event) -> None:
        self._bell = bell
        if self._messages or self._lost is not None:
            bell.set()

    def _ring(self) -> None:
        bell = self._bell
        if bell is not None:
            bell.set()


class LocalChannel:
    """One end of a pair in this process; see `local_pair`."""

    def __init__(self, inbox: Inbox, other: Inbox) -> None:
        self._inbox = inbox
        self._other = other

    def send(self, message: bytes) -> None:
        if self._inbox.lost is not None:
            raise PeerLost(self._inbox.lost)
        self._other.put(message)

    def poll(self) -> bytes | None:
        return self._inbox.take()

    def listen(self, bell: threading.Event) -> None:
        self._inbox.listen(bell)

    def close(self) -> None:
        self._inbox.lose("this end of the channel was closed")
        self._other.lose("the other end of the channel was closed")


def local_pair() -> tuple[LocalChannel, LocalChannel]:
    """Both ends of a channel within one process."""
    one, two = Inbox(), Inbox()
    return LocalChannel(one, two), LocalChannel(two, one)
