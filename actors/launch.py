"""Starts actors where they belong and waits until they can work.

Knows: Ray's ways of placing, naming and watching actors.
Refuses to know: what the actors compute. The only file that turns a class into an actor.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.loop import Phase
from actors.verifier import Verifier
from cluster.config import EngineConfig
from cluster.errors import OutriderError, PeerLost

Answer = TypeVar("Answer")

#: Named actors of this prefix are verifiers; whoever waits for one can ask it for its progress.
VERIFIER_PREFIX = "outrider-verifier-"
#: Longest from "start the process" to "the engine stands": a first start may convert a model.
START_S = 900.0
#: How often the launcher looks, in seconds.
POLL_S = 0.2
#: Longest one question to a live actor may take while its engine is being built (loading holds the GIL).
ASK_S = 60.0


class VerifierProcess(Verifier):
    """A verifier that has a process to itself."""

    def __init__(self, config: EngineConfig) -> None:
        # Ray limits an actor to as many OpenMP threads as it has CPUs reserved; the target wants the
        # cores of this process. Said before torch is imported, which is when it is read.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(config.target.threads or cores)
        super().__init__(config)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor goes: a bundle of a placement group, or anywhere with room when `group` is None."""

    group: PlacementGroup | None = None
    bundle: int = 0

    def options(self) -> dict[str, Any]:
        if self.group is None:
            return {}
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle)}


def start_verifier(config: EngineConfig, place: Place, cpus: float, gpus: float, name: str) -> Any:
    """Start the actor; returns its handle at once. It ends with whoever holds the handle.

    It is never restarted in place: an engine without its requests is of no use, so its owner is
    replaced as a whole.
    """
    actor = ray.remote(VerifierProcess)
    return actor.options(
        num_cpus=cpus,
        num_gpus=gpus,
        name=VERIFIER_PREFIX + name,
        max_restarts=0,
        max_concurrency=10_000,
        **place.options(),
    ).remote(config)


async def wait_ready(verifier: Any, report: Callable[[str], None], deadline_s: float = START_S) -> None:
    """Return when the engine stands; raises what building it raised, or PeerLost at the deadline."""
    began, last = time.monotonic(), ""
    while True:
        now = await ask(verifier.progress.remote(), ASK_S)
        if now.news != last:
            last = now.news
            report(f"{time.monotonic() - began:6.1f} s  {last}")
        if now.phase is Phase.RUNNING:
            return
        if now.phase is not Phase.BUILDING:
            raise now.error or PeerLost("the engine stopped while it was being built")
        if time.monotonic() - began > deadline_s:
            raise PeerLost(f"the engine was not ready after {deadline_s:.0f} s; it was at: {last or 'the very start'}")
        await asyncio.sleep(POLL_S)


async def ask(answer: Awaitable[Answer], deadline_s: float) -> Answer:
    """Await an actor's answer with a deadline, with errors as Outrider's own."""
    try:
        return await asyncio.wait_for(asyncio.ensure_future(_plain(answer)), deadline_s)
    except TimeoutError:
        raise PeerLost(f"the engine process did not answer within {deadline_s:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise translate(error) from error


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
