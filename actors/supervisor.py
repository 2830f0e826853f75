"""Keeps drafters of an engine attached, whatever happens to them.

Knows: when a drafter is dead, frozen or no longer paired, what to do then, and when a shared one is let go.
Refuses to know: where drafters sit (their maker's business), and the engine, which goes on without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray

from actors.asking import ASK_S, START_S, ask, wait_ready
from actors.drafter import MEET_S
from actors.process import Invitation
from cluster.errors import OutriderError, PeerLost

#: How often a drafter is asked how it is, and longest it may take to answer, in seconds.
LOOK_S = 0.5
FROZEN_S = 10.0
#: Pause before a lost drafter is replaced, in seconds: doubled with every failure in a row, up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
#: An engine without work for so long lets shared drafters go, in seconds.
LINGER_S = 5.0

_FAULTS = (OutriderError, ray.exceptions.RayError)
_log = logging.getLogger(__name__)


class Pair:
    """A verifier and one drafter that both stand. index: position in `drafts`. backend: of the channel."""

    def __init__(self, verifier: Any, drafter: Any, index: int, backend: str) -> None:
        self._verifier = verifier
        self._drafter = drafter
        self._index = index
        self._backend = backend
        self._invitation: Invitation | None = None

    async def join(self) -> None:
        """Make the channel, or make it anew. Raises PeerLost."""
        self._invitation = await ask(self._drafter.invite.remote(self._backend), ASK_S)
        await ask(self._verifier.attach.remote(self._index, self._invitation), 2 * MEET_S)

    async def look(self) -> None:
        """Join again where the channel is lost between two that live. Raises PeerLost when the drafter is.

        A verifier that does not answer is its owner's business, and nothing the drafter has to be replaced for.
        """
        await ask(self._drafter.status.remote(), FROZEN_S)
        if await self._attached() is not False:
            return
        _log.warning("the channel to a drafter of drafts.%d is made anew", self._index)
        try:
            await self.join()
        except _FAULTS:
            if await self._attached() is not None:
                raise

    async def part(self) -> None:
        """Let the drafter go."""
        if self._invitation is not None:
            with contextlib.suppress(*_FAULTS):  # with a verifier that is lost the channel is too
                await ask(self._verifier.detach.remote(self._invitation), FROZEN_S)

    async def _attached(self) -> bool | None:
        """What the verifier says of the channel; None while it does not answer."""
        try:
            return await ask(self._verifier.attached.remote(self._invitation), FROZEN_S)
        except _FAULTS:
            return None


class Keeper:
    """One dedicated drafter's keeper. make: starts a drafter and returns its handle; called again after each loss."""

    def __init__(self, make: Callable[[], Any], verifier: Any, index: int, backend: str) -> None:
        self._make = make
        self._verifier = verifier
        self._index = index
        self._backend = backend
        self._drafter = make()
        self._task: asyncio.Task[None] | None = None

    async def stand(self, report: Callable[[str], None]) -> None:
        """Return when the drafter can work. Raises what building it raised."""
        await wait_ready(self._drafter, report, what=f"the drafter of drafts.{self._index}")

    async def start(self) -> None:
        """Pair drafter and verifier, which both stand, and keep them so from now on."""
        pair = self._pair()
        with contextlib.suppress(*_FAULTS):  # the first look joins them
            await pair.join()
        self._task = asyncio.create_task(self._keep(pair))

    def end(self) -> None:
        """Let the drafter go."""
        if self._task is not None:
            self._task.cancel()
        self._kill()

    def _pair(self) -> Pair:
        return Pair(self._verifier, self._drafter, self._index, self._backend)

    async def _keep(self, pair: Pair) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                while True:
                    await pair.look()
                    pause = FIRST_PAUSE_S
                    await asyncio.sleep(LOOK_S)
            except _FAULTS as error:
                _log.warning("the drafter of drafts.%d is replaced: %s", self._index, error)
            self._kill()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            self._drafter = self._make()
            pair = self._pair()
            with contextlib.suppress(*_FAULTS):  # the next look says what is wrong with it
                await self.stand(_log.info)
                await pair.join()

    def _kill(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._drafter)


class Borrower:
    """Has one shared drafter attached while the engine has work.

    lend: opens a loan: a generator whose first item is a drafter's handle; the drafter is lent until it is closed.
    """

    def __init__(self, lend: Callable[[], AsyncGenerator[Any, None]], verifier: Any, index: int) -> None:
        self._lend = lend
        self._verifier = verifier
        self._index = index
        self._steps = -1
        self._worked_at = -LINGER_S
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                if await self._busy():
                    await self._borrow()
                    pause = FIRST_PAUSE_S
            except _FAULTS as error:
                _log.warning("a shared drafter of drafts.%d is lost: %s", self._index, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            await asyncio.sleep(LOOK_S)

    async def _borrow(self) -> None:
        """One loan, until the engine is idle. Raises PeerLost when the drafter is."""
        loan = self._lend()
        try:
            try:  # the first may have to be started
                drafter = await asyncio.wait_for(anext(loan), START_S)
            except (StopAsyncIteration, TimeoutError):
                raise PeerLost("nobody lends a drafter") from None
            pair = Pair(self._verifier, drafter, self._index, "gloo")
            await pair.join()
            while await self._busy():
                await pair.look()
                await asyncio.sleep(LOOK_S)
            await pair.part()
        finally:
            await loan.aclose()

    async def _busy(self) -> bool:
        """Whether the engine has stepped lately. One that does not answer needs no drafter."""
        try:
            status = await ask(self._verifier.status.remote(), ASK_S)
        except _FAULTS:
            return False
        if status.steps != self._steps or status.running:
            self._steps, self._worked_at = status.steps, time.monotonic()
        return time.monotonic() - self._worked_at < LINGER_S
