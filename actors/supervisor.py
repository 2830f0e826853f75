"""Keeps one drafter of an engine alive and attached, whatever happens to it.

Knows: when a drafter is dead, frozen or no longer paired, and what to do then.
Refuses to know: where it sits (its maker's business), and the engine, which goes on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import ray

from actors.asking import ASK_S, ask, wait_ready
from actors.drafter import MEET_S
from cluster.errors import OutriderError

#: How often a drafter is asked how it is, and longest it may take to answer, in seconds.
LOOK_S = 0.5
FROZEN_S = 10.0
#: Pause before a drafter is started anew, in seconds: doubled with every failure in a row, up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0

_log = logging.getLogger(__name__)


class Keeper:
    """One drafter's keeper. make: starts a drafter and returns its handle; called again after each loss.

    index: position in `drafts`. backend: of the channel (parallel/groups.py).
    """

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
        await self._pair()
        self._task = asyncio.create_task(self._keep())

    def end(self) -> None:
        """Let the drafter go."""
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._drafter)

    async def _pair(self) -> None:
        invitation = await ask(self._drafter.invite.remote(self._backend), ASK_S)
        await ask(self._verifier.attach.remote(self._index, invitation), 2 * MEET_S)

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                await self._watch()
            except OutriderError as error:
                _log.warning("the drafter of drafts.%d is replaced: %s", self._index, error)
            except ray.exceptions.RayError as error:
                _log.warning("the drafter of drafts.%d is replaced: %r", self._index, error)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._drafter)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            self._drafter = self._make()
            try:
                await self.stand(_log.info)
                await self._pair()
                pause = FIRST_PAUSE_S
            except (OutriderError, ray.exceptions.RayError) as error:
                _log.warning("the new drafter of drafts.%d does not stand yet: %s", self._index, error)

    async def _watch(self) -> None:
        """Return never; raises when the drafter is lost. A lost channel between two that live is made anew."""
        while True:
            now = await ask(self._drafter.status.remote(), FROZEN_S)
            if now.verifiers == 0:
                _log.warning("the channel to the drafter of drafts.%d is made anew", self._index)
                await self._pair()
            await asyncio.sleep(LOOK_S)
