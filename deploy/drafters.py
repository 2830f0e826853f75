"""Shared drafters: deployments of the application that lend drafters to its engines.

Knows: that a loan is a request that stays open: Serve finds it a drafter, counts it as load, and scales by it.
Refuses to know: who drafts how, and what an engine does with a drafter (actors/supervisor.py).

    Engine replica --attend (stream)--> Drafter replica     first item: the handle of its drafter actor
                   <------------------- still there, still there, ...
    Engine's verifier <--channel--> drafter actor           drafts and verdicts, not through Serve

An engine opens its loans when it has work and closes them when it has had none for a while, so drafters
without a borrower are scaled away, to none where `min_replicas` is 0, and come back with the first request.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from ray import serve

from actors.asking import ask
from actors.launch import Loan, Lone
from actors.supervisor import FROZEN_S, LOOK_S
from cluster.config import Config
from cluster.config_drafts import DraftingConfig
from cluster.errors import OutriderError

#: CPUs set aside for the process that lends; the drafter has its own.
LENDER_CPUS = 0.1
#: Engines that one drafter serves side by side before another is started, and the most it takes.
LOANS, MOST_LOANS = 2, 4

_log = logging.getLogger("ray.serve")


def shared_drafts(config: Config) -> dict[int, DraftingConfig]:
    """Those of `drafts` whose drafters serve several engines, by position."""
    return {
        index: draft
        for index, draft in enumerate(config.drafts)
        if isinstance(draft, DraftingConfig) and draft.drafter.place == "shared"
    }


def drafter_deployments(config: Config, overrides: Mapping[str, Mapping[str, Any]]) -> dict[int, serve.Application]:
    """A deployment for each shared draft, named Drafter0, Drafter1, ... by position; overrides: by name.

    Its autoscaling is Serve's own: give an `autoscaling_config` or `num_replicas` under `deployments`.
    """
    return {
        index: serve.deployment(
            name=f"Drafter{index}",
            max_ongoing_requests=MOST_LOANS,
            ray_actor_options={"num_cpus": LENDER_CPUS},
            autoscaling_config={
                "min_replicas": 0,
                "max_replicas": draft.drafter.replicas,
                "target_ongoing_requests": LOANS,
                "upscale_delay_s": 1.0,
                "downscale_delay_s": 60.0,
            },
            health_check_period_s=1,
            health_check_timeout_s=FROZEN_S + 2.0,  # a health check asks the drafter
            graceful_shutdown_timeout_s=1,  # a loan ends when its engine is idle, not by itself
        )(DrafterReplica)
        .options(**overrides.get(f"Drafter{index}", {}))
        .bind(config, index)
        for index, draft in shared_drafts(config).items()
    }


class DrafterReplica:
    """Owns one drafter in a process of its own, and lends it."""

    async def __init__(self, config: Config, index: int) -> None:  # type: ignore[misc]  # Serve awaits it
        name = serve.get_replica_context().replica_id.unique_id
        self._lone = await Lone.start(config, index, name, _log.info)

    async def attend(self) -> AsyncGenerator[Any, None]:
        """The drafter's handle, then nothing, until the borrower closes the loan or the drafter is lost."""
        yield self._lone.drafter
        while True:
            await ask(self._lone.drafter.status.remote(), FROZEN_S)
            yield None
            await asyncio.sleep(LOOK_S)

    async def check_health(self) -> None:
        """A replica without a drafter ends, and is replaced."""
        try:
            await ask(self._lone.drafter.status.remote(), FROZEN_S)
        except OutriderError:
            os._exit(1)


def loans(config: Config, handles: Mapping[int, Any]) -> list[Loan]:
    """As many loans of each shared draft as an engine wants; handles: of their deployments, by position."""
    drafts = shared_drafts(config)
    return [
        (index, _lender(handle)) for index, handle in handles.items() for _ in range(drafts[index].drafter.replicas)
    ]


def _lender(handle: Any) -> Callable[[], AsyncGenerator[Any, None]]:
    """Opens loans from the deployment behind a Serve handle."""
    attending = handle.options(stream=True)

    async def lend() -> AsyncGenerator[Any, None]:
        response = attending.attend.remote()
        try:
            async for item in response:
                yield item
        finally:
            response.cancel()

    return lend
