"""Questions to actors: each with a deadline, each error one of ours.

Knows: what Ray's errors say about the process asked.
Refuses to know: what is asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray

from actors.loop import Phase
from cluster.errors import OutriderError, PeerLost

Answer = TypeVar("Answer")

#: Longest from "start the process" to "the engine stands": a first start may convert a model.
START_S = 900.0
#: How often a process being built is looked at, in seconds.
POLL_S = 0.2
#: Longest one question to a live actor may take while its engine is being built (loading holds the GIL).
ASK_S = 60.0


async def wait_ready(
    process: Any, report: Callable[[str], None], deadline_s: float = START_S, what: str = "the engine"
) -> None:
    """Return when an actor with `progress` stands; raises what building it raised, or PeerLost at the deadline."""
    began, last = time.monotonic(), ""
    while True:
        now = await ask(process.progress.remote(), ASK_S)
        if now.news != last:
            last = now.news
            report(f"{time.monotonic() - began:6.1f} s  {last}")
        if now.phase is Phase.RUNNING:
            return
        if now.phase is not Phase.BUILDING:
            raise now.error or PeerLost(f"{what} stopped while it was being built")
        if time.monotonic() - began > deadline_s:
            raise PeerLost(f"{what} was not ready after {deadline_s:.0f} s; it was at: {last or 'the very start'}")
        await asyncio.sleep(POLL_S)


async def ask(answer: Awaitable[Answer], deadline_s: float) -> Answer:
    """Await an actor's answer with a deadline, with errors as Outrider's own."""
    try:
        return await within(answer, deadline_s)
    except TimeoutError:
        raise PeerLost(f"the engine process did not answer within {deadline_s:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise translate(error) from error


async def within(answer: Awaitable[Answer], deadline_s: float) -> Answer:
    """Await an answer; TimeoutError at the deadline.

    It is waited for twice, half as long: when this process itself did not get to run for a while, an answer that has
    come meanwhile is found after the first half, and nobody is taken for dead because we were asleep.
    """
    coming = asyncio.ensure_future(_plain(answer))
    try:
        for _ in range(2):
            if (await asyncio.wait({coming}, timeout=deadline_s / 2))[0]:
                return coming.result()
    finally:
        coming.cancel()
    raise TimeoutError


def translate(error: BaseException) -> BaseException:
    """What a Ray error says about us: the OutriderError inside it, PeerLost for a death, else itself."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, OutriderError):
        return cause
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OwnerDiedError):
        return PeerLost("the engine process died; it is being replaced, try again")
    return error


async def _plain(answer: Awaitable[Answer]) -> Answer:
    return await answer  # an ObjectRef is awaitable but no coroutine
