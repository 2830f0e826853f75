"""What rank 0 tells arrives as it was meant: short plans, plans beyond one buffer, beats and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import PeerLost
from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.orders import Leader, orders
from cluster.parallel.groups import Group, Rendezvous, join

ROWS = st.builds(
    lambda sequence, first, tokens, blocks, drafts, parents: PlanRow(
        sequence, first, tokens, blocks, drafts, drafts + 1, parents=parents
    ),
    sequence=st.integers(0, 2**31 - 1),
    first=st.integers(0, 2**20),
    tokens=st.lists(st.integers(0, 2**20), min_size=1, max_size=40).map(tuple),
    blocks=st.lists(st.integers(0, 2**20), min_size=1, max_size=40).map(tuple),
    drafts=st.integers(0, 8),
    parents=st.none() | st.lists(st.integers(-1, 40), max_size=6).map(tuple),
)
MOVES = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 2**20)), max_size=4).map(tuple)


class Pair:
    """A leader and one follower, in threads of this process."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        rendezvous = Rendezvous.host()

        def member(rank: int) -> Group:
            return join(rendezvous.endpoint, rank, 2, name="tp", timeout_s=timeout_s)

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(member, 1)
            self.leader = Leader(member(0))
            self.follower = other.result()
        rendezvous.close()
        self.got: list[Plan] = []
        self.error: PeerLost | None = None
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def tell(self, *rows: PlanRow, moves: tuple[tuple[int, int], ...] = ()) -> Plan:
        with self.leader.turn:
            self.leader.tell(Plan(7, rows, Knobs(), moves))
        deadline = time.monotonic() + 20
        while not self.got:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return self.got.pop()

    def _follow(self) -> None:
        try:
            for plan in orders(self.follower):
                self.got.append(plan)
        except PeerLost as error:
            self.error = error


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.leader.stop()
    pair.thread.join(10)
    assert not pair.thread.is_alive()
    assert pair.error is None


@settings(deadline=None)
@given(rows=st.lists(ROWS, max_size=4), moves=MOVES)
def test_a_plan_arrives_with_all_a_runner_computes_from(
    pair: Pair, rows: list[PlanRow], moves: tuple[tuple[int, int], ...]
) -> None:
    got = pair.tell(*rows, moves=moves)
    assert got.moves == moves
    assert [_computed(row) for row in got.rows] == [_computed(row) for row in rows]


def test_a_plan_beyond_the_buffer_arrives_whole(pair: Pair) -> None:
    long = PlanRow(1, 0, tuple(range(9000)), tuple(range(300)), wants=1)
    assert _computed(pair.tell(long).rows[0]) == _computed(long)
    short = PlanRow(2, 5, (1,), (2,), wants=1)
    assert _computed(pair.tell(short, short).rows[1]) == _computed(short)


def test_a_leader_with_nothing_to_say_is_waited_for_and_one_that_is_gone_is_not() -> None:
    pair = Pair(timeout_s=3.0)
    time.sleep(4.5)
    assert pair.error is None
    assert pair.tell(PlanRow(1, 0, (1,), (1,))).rows
    with pair.leader.turn:  # as if the process were frozen: not even a beat
        pair.thread.join(10)
    assert pair.error is not None
    assert "broadcast from rank 0 failed" in str(pair.error)
    pair.leader.stop()


def _computed(row: PlanRow) -> tuple[object, ...]:
    return row.sequence, row.first, row.tokens, row.blocks, row.wants, row.parents
