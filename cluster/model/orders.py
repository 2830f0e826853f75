"""What rank 0 tells the other ranks of a tensor-parallel model, as one int32 buffer of fixed size a step.

Knows: which parts of a plan a runner computes from, how they are spelt as integers, and that an
idle rank 0 still says that it lives.
Refuses to know: what is computed; who may decide anything: nothing but these orders moves a rank.

    buffer   kind, integers that follow, rows | per row: sequence, first, wants, and how many tokens, blocks, parents
             (-1: no tree) | tokens | blocks | parents | moves; padded with what was there before

A step that does not fit sends the rest in a second buffer of exactly its size. A rank waits for the
next order no longer than the group's timeout; rank 0 sends a beat whenever it had nothing else to
say for a quarter of that. So an idle leader is no error, and a frozen one is noticed.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import BrokenInvariant, PeerLost
from cluster.messages import Knobs, Plan, PlanRow
from cluster.parallel.collectives import broadcast
from cluster.parallel.groups import Group

_FIXED = 4096  # integers: 16 KiB carry some hundred rows of a few tokens and blocks each
_HEAD = 3
_ROW = 6
_BEATS = 4  # within one timeout
_WRAP = 2**31  # sequence numbers only serve messages here


class _Kind(enum.IntEnum):
    STEP = 1
    BEAT = 2
    STOP = 3


class Leader:
    """Rank 0's side: tells every step, beats between steps from a thread of its own, and says when to stop.

    The methods may be called from one thread. The group is used by nobody else outside `hold`.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buffer = torch.zeros(_FIXED, dtype=torch.int32)
        self._turn = threading.Lock()
        self._stopped = threading.Event()
        self._said = 0
        if group.size > 1:
            threading.Thread(target=self._beat, name=f"beat of {group.name}", daemon=True).start()

    @property
    def turn(self) -> threading.Lock:
        """Held while a step uses the group, so that no beat falls between its collectives."""
        return self._turn

    def tell(self, plan: Plan) -> None:
        """Send a step; the caller holds `turn`. Raises PeerLost."""
        self._send(_Kind.STEP, _spell(plan), len(plan.rows))

    def stop(self) -> None:
        """Send the followers home and leave the group. May be called twice; a lost peer is no error any more."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        with self._turn:
            with contextlib.suppress(PeerLost):
                self._send(_Kind.STOP, np.empty(0, np.int32), 0)
            self._group.close()

    def _send(self, kind: _Kind, payload: npt.NDArray[np.int32], rows: int) -> None:
        buffer = self._buffer.numpy()
        buffer[:_HEAD] = kind, len(payload), rows
        fits = payload[: _FIXED - _HEAD]
        buffer[_HEAD : _HEAD + len(fits)] = fits
        broadcast(self._group, self._buffer)
        if len(fits) < len(payload):
            broadcast(self._group, torch.from_numpy(payload[len(fits) :].copy()))
        self._said += 1

    def _beat(self) -> None:
        said = self._said
        while not self._stopped.wait(self._group.timeout_s / _BEATS):
            # A step under way says enough: its collectives wait for everybody.
            if said == self._said and self._turn.acquire(blocking=False):
                try:
                    self._send(_Kind.BEAT, np.empty(0, np.int32), 0)
                except PeerLost:
                    return  # the group keeps the reason: the next step raises it
                finally:
                    self._turn.release()
            said = self._said


def orders(group: Group) -> Iterator[Plan]:
    """The steps rank 0 tells the other ranks, until it says stop. Raises PeerLost when it is gone or frozen."""
    buffer = torch.zeros(_FIXED, dtype=torch.int32)
    while True:
        broadcast(group, buffer)
        kind, length, rows = buffer[:_HEAD].tolist()
        if kind == _Kind.STOP:
            return
        if kind == _Kind.STEP:
            payload = buffer[_HEAD : _HEAD + length]
            if len(payload) < length:
                rest = torch.empty(length - len(payload), dtype=torch.int32)
                payload = torch.cat([payload, broadcast(group, rest)])
            yield _read(payload.numpy(), rows)


def _spell(plan: Plan) -> npt.NDArray[np.int32]:
    heads = [
        (
            row.sequence % _WRAP,
            row.first,
            row.wants,
            len(row.tokens),
            len(row.blocks),
            -1 if row.parents is None else len(row.parents),
        )
        for row in plan.rows
    ]
    lists = (*(row.tokens for row in plan.rows), *(row.blocks for row in plan.rows))
    trees = (row.parents or () for row in plan.rows)
    return np.fromiter(itertools.chain(*heads, *lists, *trees, *plan.moves), np.int32)


def _read(payload: npt.NDArray[np.int32], rows: int) -> Plan:
    heads = payload[: rows * _ROW].reshape(rows, _ROW).tolist()
    values = iter(payload[rows * _ROW :].tolist())
    tokens, blocks, trees = (
        [None if head[kind] < 0 else tuple(itertools.islice(values, head[kind])) for head in heads]
        for kind in (3, 4, 5)
    )
    spelt = rows * _ROW + sum(max(0, size) for head in heads for size in head[3:])
    moves = payload[spelt:].tolist()
    if spelt > len(payload) or len(moves) % 2:
        raise BrokenInvariant(f"an order of {len(payload)} integers is not what its {rows} rows say")
    told = zip(heads, tokens, blocks, trees, strict=True)
    return Plan(
        round=0,
        rows=tuple(
            PlanRow(head[0], head[1], own or (), held or (), wants=head[2], parents=parents)
            for head, own, held, parents in told
        ),
        knobs=Knobs(),
        moves=tuple(zip(moves[::2], moves[1::2], strict=True)),
    )
