"""Channels: what goes in comes out in order, a lost peer is noticed in time, and closing leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from cluster.errors import BrokenInvariant, ConfigError, PeerLost
from cluster.parallel.channel import local_pair
from cluster.parallel.groups import Rendezvous
from cluster.parallel.peer import PeerChannel, meet
from tests.peers import Peers, take


@pytest.fixture
def peers() -> Iterator[Peers]:
    with Peers() as peers:
        yield peers


def test_a_pair_in_one_process() -> None:
    ours, theirs = local_pair()
    assert ours.poll() is None
    for message in (b"1", b"2", b"3"):
        ours.send(message)
    assert [take(theirs) for _ in range(2)] == [b"1", b"2"]
    ours.close()
    ours.close()
    assert take(theirs) == b"3"  # what had arrived is still read
    for end in (ours, theirs):
        with pytest.raises(PeerLost, match="closed"):
            end.poll()
        with pytest.raises(PeerLost, match="closed"):
            end.send(b"4")


def test_who_listens_late_hears_what_came_before() -> None:
    ours, theirs = local_pair()
    ours.send(b"early")
    bell = threading.Event()
    theirs.listen(bell)
    assert bell.is_set()


def test_messages_of_any_size_cross_in_order(peers: Peers) -> None:
    channel, process = peers.start("echo")
    sent = [os.urandom(size) for size in (1, 2, 8176, 8177, 300, 100_000, 8000, 1_000_000, 1)]
    for message in sent:
        channel.send(message)
    assert [take(channel) for _ in sent] == sent
    time.sleep(2.0)  # longer than any silence that is borne: rings keep the channel
    channel.send(b"still there")
    assert take(channel) == b"still there"
    with pytest.raises(BrokenInvariant):
        channel.send(b"")
    began = time.monotonic()
    channel.close()
    assert time.monotonic() - began < 0.5
    assert channel.wait_closed(5.0)
    assert process.wait(20) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_peer_is_noticed_within_two_seconds(peers: Peers, how: signal.Signals) -> None:
    channel, process = peers.start("echo")
    channel.send(b"hello")
    assert take(channel) == b"hello"
    began = time.monotonic()
    process.send_signal(how)
    with pytest.raises(PeerLost, match="rank 1"):
        take(channel)
    assert time.monotonic() - began < 2.0
    with pytest.raises(PeerLost):
        channel.send(b"anyone?")
    channel.close()
    assert channel.wait_closed(5.0)


def test_closing_never_hangs_even_while_the_peer_is_frozen(peers: Peers) -> None:
    channel, process = peers.start("echo")
    process.send_signal(signal.SIGSTOP)
    for _ in range(50):
        channel.send(bytes(1_000_000))
    began = time.monotonic()
    channel.close()
    assert time.monotonic() - began < 0.5
    assert channel.wait_closed(8.0)


def test_nobody_comes() -> None:
    rendezvous = Rendezvous.host()
    with pytest.raises(PeerLost, match="did not come"):
        meet(rendezvous.endpoint, 0, name="alone", meet_s=0.2)
    with pytest.raises(ConfigError, match="joined already"):
        meet(rendezvous.endpoint, 0, name="alone", meet_s=0.2)
    rendezvous.close()


def both_ends(rendezvous: Rendezvous, name: str) -> list[PeerChannel]:
    ends: list[PeerChannel | None] = [None, None]

    def join(rank: int) -> None:
        ends[rank] = meet(rendezvous.endpoint, rank, name=name)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [end for end in ends if end is not None]


def test_many_channels_leave_no_thread_and_no_socket() -> None:
    rendezvous, process = Rendezvous.host(), psutil.Process()

    def held() -> tuple[int, int]:
        return threading.active_count(), len(process.net_connections())

    def once(number: int) -> None:
        ours, theirs = both_ends(rendezvous, f"pair {number}")
        ours.send(b"x")
        assert take(theirs) == b"x"
        theirs.close()
        with pytest.raises(PeerLost):
            take(ours)
        ours.close()
        assert ours.wait_closed(5.0)
        assert theirs.wait_closed(5.0)

    once(0)
    threads, sockets = held()
    for number in range(1, 8):
        once(number)
    until = time.monotonic() + 10
    while held() != (threads, sockets) and time.monotonic() < until:
        time.sleep(0.05)
    now = held()
    assert now[0] <= threads
    assert now[1] <= sockets
    rendezvous.close()
