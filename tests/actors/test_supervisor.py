"""Who is replaced when something does not answer: the one that did not, and nobody else. No Ray: fakes of handles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actors import supervisor
from actors.asking import within
from actors.process import Invitation
from actors.supervisor import Borrower, Keeper, Pair
from cluster.errors import OutriderError, PeerLost


class Method:
    """An actor's method: `remote` answers what `say` does, or never while `frozen`."""

    def __init__(self, owner: Any, say: Callable[..., Any]) -> None:
        self._owner = owner
        self._say = say

    def remote(self, *args: Any) -> Awaitable[Any]:
        async def answer() -> Any:
            if self._owner.frozen:
                await asyncio.sleep(60.0)
            if self._owner.dead:
                raise PeerLost("dead")
            return self._say(*args)

        return answer()


class Process:
    """What drafter and verifier have in common."""

    def __init__(self) -> None:
        self.frozen = self.dead = False


class FakeDrafter(Process):
    def __init__(self) -> None:
        super().__init__()
        self.invitations = 0
        self.status = Method(self, lambda: None)
        self.invite = Method(self, self._invite)
        self.progress = Method(self, lambda: SimpleNamespace(news="", phase=supervisor_running()))

    def _invite(self, backend: str) -> Invitation:
        self.invitations += 1
        return Invitation("here", 1, f"pair {id(self)} {self.invitations}")


class FakeVerifier(Process):
    """refuses: whether nobody can be met."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False
        self.steps = 0
        self.channels: set[Invitation] = set()
        self.attach = Method(self, self._attach)
        self.attached = Method(self, lambda invitation: invitation in self.channels)
        self.detach = Method(self, self.channels.discard)
        self.status = Method(self, lambda: SimpleNamespace(steps=self.steps, running=0))

    def _attach(self, index: int, invitation: Invitation) -> None:
        if self.refuses:
            raise PeerLost("nobody came")
        self.channels.add(invitation)


def supervisor_running() -> Any:
    from actors.loop import Phase

    return Phase.RUNNING


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FROZEN_S", 0.1)
    monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervisor, "LINGER_S", 0.2)


async def test_an_answer_that_came_while_nobody_looked_counts() -> None:
    async def answer() -> int:
        await asyncio.sleep(0.01)
        return 7

    asked = asyncio.ensure_future(within(answer(), 0.2))
    await asyncio.sleep(0)
    time.sleep(0.3)  # this process does not get to run
    assert await asked == 7
    with pytest.raises(TimeoutError):
        await within(asyncio.sleep(60.0), 0.05)


async def joined() -> tuple[Pair, FakeVerifier, FakeDrafter]:
    verifier, drafter = FakeVerifier(), FakeDrafter()
    pair = Pair(verifier, drafter, 0, "gloo")
    await pair.join()
    return pair, verifier, drafter


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("fault", ["frozen", "dead"])
async def test_a_drafter_that_does_not_answer_is_lost(fault: str) -> None:
    pair, _, drafter = await joined()
    setattr(drafter, fault, True)
    with pytest.raises(OutriderError):
        await pair.look()


@pytest.mark.parametrize("fault", ["frozen", "dead"])
async def test_a_verifier_that_does_not_answer_is_not_the_drafters_fault(fault: str) -> None:
    pair, verifier, drafter = await joined()
    setattr(verifier, fault, True)
    await pair.look()
    await pair.part()
    assert drafter.invitations == 1


async def test_a_lost_channel_is_made_anew_and_a_drafter_that_cannot_be_met_is_lost() -> None:
    pair, verifier, drafter = await joined()
    verifier.channels.clear()
    await pair.look()
    assert (drafter.invitations, len(verifier.channels)) == (2, 1)
    verifier.channels.clear()
    verifier.refuses = True
    with pytest.raises(PeerLost, match="nobody came"):
        await pair.look()


async def test_a_verifier_lost_while_it_is_joined_is_not_the_drafters_fault() -> None:
    pair, verifier, _ = await joined()
    verifier.channels.clear()

    def dies(index: int, invitation: Invitation) -> None:
        verifier.dead = True
        raise PeerLost("died")

    verifier.attach = Method(verifier, dies)
    await pair.look()


async def test_a_keeper_replaces_its_drafter_and_not_for_the_verifiers_sake(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr("actors.supervisor.ray.kill", killed.append)
    verifier, made = FakeVerifier(), []

    def make() -> FakeDrafter:
        made.append(FakeDrafter())
        return made[-1]

    keeper = Keeper(make, verifier, 0, "gloo")
    await keeper.stand(lambda _: None)
    await keeper.start()
    verifier.frozen = True
    await asyncio.sleep(0.5)
    verifier.frozen = False
    assert (len(made), killed) == (1, [])
    made[0].frozen = True
    await until(lambda: len(made) == 2 and len(verifier.channels) == 2)
    assert killed == [made[0]]
    keeper.end()
    assert killed == made


async def test_a_loan_ends_with_the_engines_work_and_with_its_voice() -> None:
    verifier, open_loans = FakeVerifier(), 0

    async def lend() -> AsyncGenerator[Any, None]:
        nonlocal open_loans
        open_loans += 1
        try:
            yield FakeDrafter()
        finally:
            open_loans -= 1

    borrower = Borrower(lend, verifier, 0)
    borrower.start()
    for silent in (False, True):
        verifier.steps += 1
        await until(lambda: open_loans == 1 and len(verifier.channels) == 1)
        verifier.dead = silent
        await until(lambda: open_loans == 0)
        verifier.dead = False
        verifier.channels.clear()
    borrower.end()
