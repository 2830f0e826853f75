"""A channel to another process: two groups of two over torch.distributed, one a direction.

Knows: how a message crosses (a doorbell on the CPU that has room for a short one, then the bytes of a long
one in a transfer of matching size), and how the silence of a peer is told from its having nothing to say.
Refuses to know: what the bytes say.

    here    sender thread    doorbell (number, size, short message) | long message ->    receiver thread   there
    here    receiver thread  <- long message | doorbell (number, size, short message)    sender thread     there

gloo's receives cannot be polled and its waits not be interrupted, so a thread owns each direction and nobody else
ever waits. An end with nothing to say rings with size 0 a few times in `silence_s`; a receive that hears
nothing for `silence_s` fails, so that a frozen peer is noticed as a dead one is, only later: within `silence_s`,
not at once. After that the channel is dead: meet again.

The receive of a doorbell always waits already, so what fits into it takes one way; a transfer of its own takes
three, for its receive is only posted then. Where both ends were given a GPU, large messages cross by NCCL.
"""

from __future__ import annotations

import struct
import threading
from queue import Empty, SimpleQueue

import torch

from cluster.errors import BrokenInvariant, PeerLost
from cluster.parallel.channel import Inbox
from cluster.parallel.collectives import receive, send
from cluster.parallel.groups import Endpoint, Group, join

#: Longest silence of a peer that is well, in seconds.
SILENCE_S = 1.5
#: Rings in that time.
_BEATS = 6
#: Sizes that are no message's.
_BEAT, _FAREWELL = 0, -1
#: A doorbell: its number and the size of the message, int64 each, and the message itself where it fits.
_HEAD = struct.Struct("<qq")
_BELL = 8192
_SHORT = _BELL - _HEAD.size
#: A message of so many bytes is worth a copy to a GPU and back.
_LARGE = 1 << 18


def meet(
    endpoint: Endpoint,
    rank: int,
    *,
    name: str,
    backend: str = "gloo",
    device: torch.device | None = None,
    silence_s: float = SILENCE_S,
    meet_s: float = 30.0,
) -> PeerChannel:
    """One end of a channel with whoever else meets under this name; returns when both are there.

    endpoint: of a Rendezvous (groups.py) that either end, or a third, hosts. rank: 0 or 1, one each.
    backend, device: as for `groups.join`; the same at both ends.
    Raises PeerLost when the other does not come within `meet_s`, ConfigError for a name that was used before.
    """
    ways = [
        join(
            endpoint,
            rank,
            2,
            name=f"{name} {way}",
            backend=backend,
            timeout_s=silence_s,
            meet_s=meet_s,
            device=device,
        )
        for way in ("forth", "back")
    ]
    return PeerChannel(out=ways[rank], back=ways[1 - rank], beat_s=silence_s / _BEATS)


class PeerChannel:
    """A Channel (channel.py). The two groups are its own.

    beat_s: how often to ring when there is nothing to say.
    """

    def __init__(self, out: Group, back: Group, beat_s: float) -> None:
        self._out = out
        self._back = back
        self._beat_s = beat_s
        self._inbox = Inbox()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()  # None: say farewell and end
        self._threads = [
            threading.Thread(target=self._send_all, name=f"to {out.name}", daemon=True),
            threading.Thread(target=self._receive_all, name=f"from {back.name}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: bytes) -> None:
        if not message:
            raise BrokenInvariant("an empty message says nothing")
        if self._inbox.lost is not None:
            raise PeerLost(self._inbox.lost)
        self._outbox.put(message)

    def poll(self) -> bytes | None:
        return self._inbox.take()

    def listen(self, bell: threading.Event) -> None:
        self._inbox.listen(bell)

    def close(self) -> None:
        """Returns at once; the threads and sockets are gone when both ends know, at the latest after `silence_s`."""
        self._inbox.lose("this end of the channel was closed")
        self._outbox.put(None)

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether threads and sockets are gone, after waiting for it at most so long."""
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    # -- the two threads ---------------------------------------------------------------------

    def _send_all(self) -> None:
        number = 0
        try:
            while (message := self._next()) is not None:
                self._ring(number, len(message), message)
                if len(message) > _SHORT:
                    payload = torch.frombuffer(bytearray(message), dtype=torch.uint8)
                    send(self._out, payload.to(self._place(len(message))), 1 - self._out.rank)
                number += 1
            self._ring(number, _FAREWELL)
        except PeerLost as error:
            self._inbox.lose(str(error))
        finally:
            self._out.close()

    def _ring(self, number: int, size: int, message: bytes = b"") -> None:
        bell = bytearray(_BELL)
        _HEAD.pack_into(bell, 0, number, size)
        if len(message) <= _SHORT:
            bell[_HEAD.size : _HEAD.size + len(message)] = message
        send(self._out, torch.frombuffer(bell, dtype=torch.uint8), 1 - self._out.rank)

    def _next(self) -> bytes | None:
        """The next message; an empty one when it is time to ring."""
        try:
            return self._outbox.get(timeout=self._beat_s)
        except Empty:
            return b""

    def _receive_all(self) -> None:
        expected = 0
        bell = torch.empty(_BELL, dtype=torch.uint8)
        try:
            while True:
                rung = receive(self._back, bell, 1 - self._back.rank).numpy().tobytes()
                number, size = _HEAD.unpack_from(rung)
                if size == _FAREWELL:
                    self._inbox.lose(f"{self._back}: the other end was closed")
                    return
                if number != expected:
                    self._inbox.lose(f"{self._back}: message {expected} should come next, not {number}")
                    return
                expected += 1
                if size != _BEAT:
                    self._inbox.put(self._long(size) if size > _SHORT else rung[_HEAD.size : _HEAD.size + size])
        except PeerLost as error:
            self._inbox.lose(str(error))
        finally:
            self._back.close()
            self._outbox.put(None)  # the other direction ends too

    def _long(self, size: int) -> bytes:
        payload = torch.empty(size, dtype=torch.uint8, device=self._place(size))
        return receive(self._back, payload, 1 - self._back.rank).cpu().numpy().tobytes()

    def _place(self, size: int) -> torch.device:
        """Where a long message lies while it crosses: both ends decide alike."""
        return self._out.device if self._out.data is not self._out.control and size >= _LARGE else torch.device("cpu")
