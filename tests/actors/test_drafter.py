"""A drafter's process from inside: its seat, its building, verifiers that come and go. No Ray, real channels."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from actors.drafter import Drafter, meet_peer
from actors.loop import Phase
from actors.process import Background, take_seat
from cluster.config import parse
from cluster.draft.ngram import NgramProposer
from cluster.draft.remote import RemoteProposer
from cluster.draft.server import DraftServer, Sync
from cluster.errors import EngineStopped, ModelNotFound, PeerLost
from cluster.messages import Knobs, SequenceView
from cluster.parallel.numa import allowed_cores, keep_to
from cluster.parallel.topology import plan
from cluster.request import Sampling

CONFIG = parse({"drafts": [{"kind": "model", "model": "x", "drafter": {"place": "dedicated"}}]})
SEAT = replace(plan(CONFIG, []).seats[1], pin=False, threads=1)


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    environment, cores = dict(os.environ), allowed_cores()
    yield
    os.environ.clear()
    os.environ.update(environment)
    keep_to(cores)


def server(*_: Any) -> DraftServer:
    proposer = NgramProposer(4, 2)
    return DraftServer(proposer, Sync(proposer))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not holds():
            await asyncio.sleep(0.02)


async def standing(build: Callable[..., Any]) -> Drafter:
    drafter = Drafter(CONFIG, SEAT, build)
    async with asyncio.timeout(20.0):
        while (await drafter.progress()).phase is Phase.BUILDING:
            await asyncio.sleep(0.02)
    return drafter


async def test_invited_verifiers_get_drafts_and_leave_one_by_one() -> None:
    drafter = await standing(server)
    ends = []
    for _ in range(2):
        invitation = await drafter.invite()
        ends.append(await asyncio.to_thread(meet_peer, invitation, 1, "cpu"))
    far = RemoteProposer("model", wait_s=10.0)
    far.attach(ends[0])
    view = SequenceView(0, [1, 2, 3, 1, 2], 5, 4, Sampling(), "coupled", "", None, 3, 50)
    far.open(view)
    [offer] = await asyncio.to_thread(far.propose, [view], Knobs())
    assert offer.tokens[0] == 3
    async with asyncio.timeout(20.0):
        while (await drafter.status()).verifiers != 2:  # its end of a channel may be made a moment later
            await asyncio.sleep(0.02)
    far.detach()
    for left in (1, 0):
        async with asyncio.timeout(20.0):
            while (await drafter.status()).verifiers > left:
                await asyncio.sleep(0.02)
        ends[1].close()
    assert await asyncio.to_thread(ends[0].wait_closed, 10.0)
    await drafter.stop()
    async with asyncio.timeout(20.0):
        while (await drafter.progress()).phase is Phase.RUNNING:
            await asyncio.sleep(0.02)
    assert (await drafter.progress()).phase is Phase.STOPPED


async def test_nobody_is_invited_before_it_stands_and_a_failure_keeps_its_reason() -> None:
    go = threading.Event()

    def slowly(*_: Any) -> DraftServer:
        go.wait(20.0)
        raise ModelNotFound("no such model")

    drafter = Drafter(CONFIG, SEAT, slowly)
    with pytest.raises(EngineStopped, match="still being built"):
        await drafter.invite()
    go.set()
    async with asyncio.timeout(20.0):
        while (now := await drafter.progress()).phase is Phase.BUILDING:
            await asyncio.sleep(0.02)
    assert now.phase is Phase.CRASHED
    assert isinstance(now.error, ModelNotFound)


async def test_a_crash_while_drafting_is_seen() -> None:
    class Crashing:
        verifiers = 0

        def run(self, stop: threading.Event) -> None:
            raise PeerLost("the device is gone")

    drafter = await standing(lambda *_: Crashing())
    await until(lambda: drafter._life.progress.phase is Phase.CRASHED)
    assert isinstance(drafter._life.progress.error, PeerLost)


def test_a_seat_sets_threads_environment_and_device() -> None:
    config = parse({"placement": {"environment": {"NCCL_DEBUG": "INFO"}}, "target": {"device": "cuda"}})
    seat = plan(config, []).seats[0]
    here = take_seat(config, replace(seat, pin=False, threads=3))
    assert (here.target.device, here.target.threads) == ("cuda", 3)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["NCCL_DEBUG"] == "INFO"  # as configured, not as the kind of device would have it
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"


def test_processes_that_share_a_machine_share_its_cores() -> None:
    seat = plan(CONFIG, []).seats[0]
    every = take_seat(CONFIG, replace(seat, sharers=1)).target.threads
    half = take_seat(CONFIG, replace(seat, sharers=2)).target.threads
    assert every == len(allowed_cores())
    assert half == max(1, len(allowed_cores()) // 2)


def test_work_in_the_background_stands_then_ends() -> None:
    go = threading.Event()

    def work(report: Callable[[str], None], stand: Callable[[], None]) -> None:
        report("half way")
        said.set()
        go.wait(10.0)
        stand()

    said = threading.Event()
    life = Background(work, "the work")
    life.start()
    assert said.wait(10.0)
    assert (life.progress.phase, life.progress.news) == (Phase.BUILDING, "half way")
    go.set()
    life._thread.join(10.0)
    assert life.progress.phase is Phase.STOPPED
