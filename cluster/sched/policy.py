"""Whose turn it is: who starts next, and who gives way when blocks run short.

Knows: one class an order, each a pure ordering of sequences from what it was told of them.
Refuses to know: blocks, budgets, and what a turn consists of; the scheduler asks and obeys.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from cluster.errors import RequestError
from cluster.request import Request
from cluster.sched.sequence import Sequence

#: Smaller goes first.
Rank = tuple[float, ...]

#: Keys without a live request whose service is still remembered.
_KEYS_KEPT = 4096


class Policy(Protocol):
    """An order of sequences. Ties are broken by arrival: ids grow with it."""

    @property
    def displaces(self) -> bool:
        """Whether `outranks` is ever true."""

    def check(self, request: Request) -> None:
        """Raise RequestError when the request asks for what this order does not look at."""

    def arrived(self, sequence: Sequence) -> None:
        """It waits from now on."""

    def served(self, sequence: Sequence, tokens: int) -> None:
        """That many of its tokens were computed or emitted."""

    def left(self, sequence: Sequence) -> None:
        """It is gone."""

    def turn(self, sequence: Sequence) -> Rank:
        """Among those that wait: the smallest starts next."""

    def importance(self, sequence: Sequence) -> Rank:
        """Among those that run: the largest gives way first."""

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether one that waits may take the place of one that runs, where there is no other."""


class Fcfs:
    """First come, first served; the newest gives way."""

    displaces = False

    def check(self, request: Request) -> None:
        if request.priority:
            raise RequestError(
                f"priority={request.priority} has no meaning here: scheduler.policy is fcfs; leave it out", "priority"
            )

    def arrived(self, sequence: Sequence) -> None: ...

    def served(self, sequence: Sequence, tokens: int) -> None: ...

    def left(self, sequence: Sequence) -> None: ...

    def turn(self, sequence: Sequence) -> Rank:
        return (sequence.id,)

    def importance(self, sequence: Sequence) -> Rank:
        return (sequence.id,)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:  # noqa: ARG002  # nobody is sent back here
        return False


class ByPriority(Fcfs):
    """Lower priority numbers first, equals first come, first served; the least important, newest gives way.

    It gives way to one that waits and has a lower number, too; never to an equal.
    """

    displaces = True

    def check(self, request: Request) -> None: ...

    def turn(self, sequence: Sequence) -> Rank:
        return (sequence.request.priority, sequence.id)

    def importance(self, sequence: Sequence) -> Rank:
        return (sequence.request.priority, sequence.id)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.request.priority < running.request.priority


class Fair:
    """Among equals of another order, the key that was served least starts next.

    Service is counted in tokens, computed and emitted. A key that comes back is lifted to the
    least served of those present: having been away earns no credit, and having taken much before
    a short pause is not forgotten (the counters of arXiv 2401.00588).
    """

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self._service: OrderedDict[str, int] = OrderedDict()
        self._live: dict[str, int] = {}

    @property
    def displaces(self) -> bool:
        return self._inner.displaces

    def check(self, request: Request) -> None:
        self._inner.check(request)

    def arrived(self, sequence: Sequence) -> None:
        key = _key(sequence)
        if key not in self._live:
            least = min((self._service[other] for other in self._live), default=0)
            self._service[key] = max(self._service.get(key, 0), least)
            self._service.move_to_end(key)
        self._live[key] = self._live.get(key, 0) + 1

    def served(self, sequence: Sequence, tokens: int) -> None:
        self._service[_key(sequence)] += tokens

    def left(self, sequence: Sequence) -> None:
        key = _key(sequence)
        self._live[key] -= 1
        if not self._live[key]:
            del self._live[key]
            self._forget()

    def turn(self, sequence: Sequence) -> Rank:
        *first, last = self._inner.turn(sequence)
        return (*first, self._service[_key(sequence)], last)

    def importance(self, sequence: Sequence) -> Rank:
        return self._inner.importance(sequence)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return self._inner.outranks(waiting, running)

    def _forget(self) -> None:
        """Those longest away go first."""
        while len(self._service) - len(self._live) > _KEYS_KEPT:
            del self._service[next(key for key in self._service if key not in self._live)]


def _key(sequence: Sequence) -> str:
    return sequence.request.key or sequence.request.salt
