"""Answers that outlive the engine they began on.

Knows: what each live answer has told so far, which errors mean that its engine is lost, and when to
give up.
Refuses to know: which engines there are and who routes to them; HTTP; what a token is.

What is kept of an answer are its token ids and figures, while it lives: never more than a context of
ids a request. It is taken up again with those ids (`cluster.request.Request.emitted`), so whoever
reads the pieces sees one answer, with nothing twice and nothing missing.

A request that ends every engine it comes to must not go through all of them. Engines that were lost
before they said anything new to a request count against it, and it is kept back a while before it is
tried again, so that those it took down with it are ahead of it and count as having been served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from cluster.errors import EngineStopped, OutriderError, Overloaded, PeerLost
from cluster.messages import Statistics
from deploy.asks import Ask, Backend, Card, Piece

#: Most engines that may be lost before they told a request anything new; with one more it is taken for the cause.
SUSPECT = 2
#: How long a suspected request is kept back for each of them, in seconds.
KEPT_BACK_S = 1.0
#: First and longest pause between two looks for an engine, in seconds.
PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0

#: Told of what became of an answer: "resumed" or "given up", and why.
Note = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """failovers: most engines that may be lost under one request; 0: the first is the last.

    deadline_s: longest an answer may stand still from the loss of an engine to its next piece.
    """

    failovers: int = 4
    deadline_s: float = 120.0


class Failover:
    """A Backend over another that may lose engines, of which there are others or will be again."""

    def __init__(self, backend: Backend, patience: Patience, note: Note) -> None:
        self._backend = backend
        self._patience = patience
        self._note = note

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """See Backend. Raises EngineStopped or PeerLost only when patience is at its end."""
        course = _Course(ask, self._patience)
        while True:
            try:
                async with aclosing(self._attempt(course)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except (Overloaded, EngineStopped, PeerLost) as error:
                if isinstance(error, Overloaded) and not course.attempt:
                    raise  # told nothing and nothing lost: it is for the caller to come back
                await self._next(course, error)

    async def card(self) -> Card:
        return await self._backend.card()

    async def status(self) -> dict[str, Any]:
        return await self._backend.status()

    async def _attempt(self, course: _Course) -> AsyncGenerator[Piece, None]:
        stream = self._backend.generate(course.rest())
        async with aclosing(stream):
            while True:
                try:
                    async with asyncio.timeout(course.left_s):
                        piece = await anext(stream, None)
                except TimeoutError:
                    raise PeerLost("no other engine went on with the answer in time") from None
                if piece is None:
                    raise PeerLost("the answer broke off")
                yield course.take(piece)
                if piece.finish is not None:
                    return

    async def _next(self, course: _Course, error: OutriderError) -> None:
        """Get ready for another attempt, or raise."""
        try:
            course.broke_off(error)
            await self._wait(course)
        except OutriderError as last:
            self._note("given up", str(last))
            raise last from error
        self._note("resumed", str(error))

    async def _wait(self, course: _Course) -> None:
        """Until an engine answers, and at least as long as the course has to be kept back."""
        pause = course.pause_s
        while True:
            await asyncio.sleep(pause)
            try:
                async with asyncio.timeout(course.left_s):
                    await self._backend.status()
                    await asyncio.sleep(course.kept_back_s)
                return
            except (Overloaded, PeerLost, EngineStopped, TimeoutError):
                course.check()
            pause = min(2 * pause, LONGEST_PAUSE_S)


class _Course:
    """One answer: what was told of it, and the engines it has been through."""

    def __init__(self, ask: Ask, patience: Patience) -> None:
        self._ask = ask
        self._patience = patience
        self._tokens: list[int] = []
        self._before = Statistics()  # of the engines that were lost
        self._figures = Statistics()  # of all
        self._told = False  # whether the present attempt said anything
        self._fruitless = 0
        self._losses = 0
        self._refusals = 0  # attempts since the last loss or piece that nobody took
        self._give_up_at: float | None = None
        self.attempt = 0

    @property
    def left_s(self) -> float | None:
        """Seconds until patience ends; None while pieces come."""
        return None if self._give_up_at is None else max(0.0, self._give_up_at - time.monotonic())

    @property
    def kept_back_s(self) -> float:
        return KEPT_BACK_S * self._fruitless

    @property
    def pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(self._refusals, 10))

    def rest(self) -> Ask:
        """What is still wanted, under an id of its own: the old engine may not know yet that it is over."""
        self._told = False
        if not self.attempt:
            return self._ask
        return replace(
            self._ask,
            id=f"{self._ask.id}.{self.attempt}",
            emitted=tuple(self._tokens),
            attempt=self.attempt,
            echo=self._ask.echo and not self._tokens,
            stream=True,  # what is told is not lost again
        )

    def take(self, piece: Piece) -> Piece:
        """Note a piece; returns it with the figures of the whole answer."""
        self._told = True
        self._give_up_at = None
        self._refusals = 0
        self._tokens.extend(piece.tokens)
        if self.attempt:
            piece = replace(piece, statistics=piece.statistics.after(self._before))
        self._figures = piece.statistics
        return piece

    def broke_off(self, error: OutriderError) -> None:
        """The attempt is over. Raises when the answer is to be given up."""
        self.check()
        self._refusals += 1
        if isinstance(error, PeerLost):  # others say that nobody took it
            self._lost(error)
        self._before = replace(self._figures, failovers=self._losses)
        self.attempt += 1
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + self._patience.deadline_s

    def check(self) -> None:
        """Raise PeerLost when the answer has stood still too long."""
        if self.left_s == 0.0:
            raise PeerLost(
                f"no engine went on with the answer within {self._patience.deadline_s:g} s (serving.failover_s); "
                f"{len(self._tokens)} of its tokens were told"
            )

    def _lost(self, error: PeerLost) -> None:
        self._losses += 1
        self._fruitless += not self._told
        self._refusals = 0
        if self._losses > self._patience.failovers:
            raise PeerLost(
                f"the answer was given up after {self._losses} lost engines (serving.failovers="
                f"{self._patience.failovers}); {len(self._tokens)} of its tokens were told; the last time: {error}"
            )
        if self._fruitless > SUSPECT:
            raise PeerLost(
                f"{self._fruitless} engines were lost while they began this request, which may be the cause; "
                f"the last time: {error}"
            )
