"""Answers that outlive their engine: what is asked of the next one, what the reader sees, and when it is too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from cluster.errors import EngineStopped, OutriderError, Overloaded, PeerLost, RequestError
from cluster.messages import Statistics
from cluster.request import Sampling
from deploy import failover
from deploy.asks import Ask, Card, Piece
from deploy.failover import Failover, Patience
from deploy.openai.answer import pieces_of

TEXT = "the quick brown fox"
#: What befalls an attempt: how many letters it tells before this error.
Fate = tuple[int, Exception]


class Fleet:
    """Tells TEXT a letter a piece from where `emitted` ends; attempt number n of an ask meets `fates[n]`."""

    def __init__(self, *fates: Fate, down: int = 0) -> None:
        self.fates = fates
        self.down = down  # how many looks find no engine
        self.asks: list[Ask] = []
        self.open = 0
        self.looks = 0

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        self.asks.append(ask)
        self.open += 1
        fate = self.fates[ask.attempt] if ask.attempt < len(self.fates) else (len(TEXT), RuntimeError())
        try:
            for made, letter in enumerate(TEXT[len(ask.emitted) :]):
                await asyncio.sleep(0)
                if made == fate[0]:
                    raise fate[1]
                known = len(ask.emitted) + made + 1
                last = known == len(TEXT)
                figures = Statistics(3, 2, known, made + 1, 2 * made, 0)
                yield Piece(letter, (ord(letter),), (), "stop" if last else None, figures)
        finally:
            self.open -= 1

    async def card(self) -> Card:
        return Card("fake", 1, 100)

    async def status(self) -> dict[str, Any]:
        self.looks += 1
        if self.looks <= self.down:
            raise EngineStopped("none at the moment")
        return {}


def ask(name: str = "a", **fields: Any) -> Ask:
    return Ask(name, "prompt", Sampling(50), **fields)


class Watched:
    def __init__(self, fleet: Fleet, failovers: int = 4, deadline_s: float = 5.0) -> None:
        self.notes: list[str] = []
        self.backend = Failover(fleet, Patience(failovers, deadline_s), lambda outcome, why: self.notes.append(outcome))

    async def pieces(self, wanted: Ask | None = None) -> list[Piece]:
        async with asyncio.timeout(20):
            return [piece async for piece in self.backend.generate(wanted or ask())]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "PAUSE_S", 0.001)
    monkeypatch.setattr(failover, "KEPT_BACK_S", 0.01)


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("cut", range(len(TEXT)))
async def test_the_reader_sees_one_answer(cut: int) -> None:
    fleet = Fleet((cut, PeerLost("died")))
    watched = Watched(fleet)
    pieces = await watched.pieces()
    assert text(pieces) == TEXT
    assert [piece.finish for piece in pieces] == [None] * (len(TEXT) - 1) + ["stop"]
    assert watched.notes == ["resumed"]
    first, second = fleet.asks
    assert (second.emitted, second.attempt) == (tuple(TEXT[:cut].encode()), 1)
    assert second.id != first.id
    last = pieces[-1].statistics
    assert (last.failovers, last.output_tokens, last.rounds, last.prompt_tokens) == (1, len(TEXT), len(TEXT), 3)
    assert fleet.open == 0


async def test_engine_after_engine_may_be_lost_while_each_tells_something() -> None:
    fleet = Fleet(*[(3, PeerLost("died"))] * 4)
    watched = Watched(fleet)
    assert text(await watched.pieces()) == TEXT
    assert [len(asked.emitted) for asked in fleet.asks] == [0, 3, 6, 9, 12]
    fleet = Fleet(*[(3, PeerLost("died"))] * 5)
    watched = Watched(fleet)
    with pytest.raises(PeerLost, match=r"5 lost engines \(serving.failovers=4\); 15 of its tokens"):
        await watched.pieces()
    assert watched.notes == ["resumed"] * 4 + ["given up"]


async def test_a_request_that_ends_engines_is_not_tried_on_all_of_them() -> None:
    fleet = Fleet(*[(0, PeerLost("died"))] * 9)
    watched = Watched(fleet, failovers=9)
    with pytest.raises(PeerLost, match="3 engines were lost while they began this request"):
        await watched.pieces()
    assert len(fleet.asks) == 3
    assert fleet.open == 0


async def test_those_it_takes_down_are_ahead_of_it_and_go_on() -> None:
    """Every engine dies as it begins the poisonous request; others on it lose engines, never their answer."""
    crash = asyncio.Event()

    class Shared(Fleet):
        async def generate(self, wanted: Ask) -> AsyncGenerator[Piece, None]:
            nonlocal crash
            if wanted.id.startswith("poison"):
                self.asks.append(wanted)
                crash.set()
                crash = asyncio.Event()
                raise PeerLost("died")
            dead = crash
            async with aclosing(super().generate(wanted)) as pieces:
                async for piece in pieces:
                    await asyncio.sleep(0.004)
                    if dead.is_set():
                        raise PeerLost("died")
                    yield piece

    fleet = Shared()
    watched = Watched(fleet)
    told = await asyncio.gather(
        watched.pieces(ask("a")), watched.pieces(ask("b")), watched.pieces(ask("poison")), return_exceptions=True
    )
    assert [text(pieces) for pieces in told[:2]] == [TEXT, TEXT]  # type: ignore[arg-type]
    assert isinstance(told[2], PeerLost)
    assert sum(asked.id.startswith("poison") for asked in fleet.asks) == 3


async def test_one_that_nobody_took_is_not_suspected() -> None:
    fleet = Fleet(*[(0, EngineStopped("being replaced"))] * 6, down=3)
    watched = Watched(fleet)
    pieces = await watched.pieces()
    assert text(pieces) == TEXT
    assert pieces[-1].statistics.failovers == 0
    assert fleet.looks > 6


async def test_a_full_queue_is_the_callers_at_first_and_waited_for_after_a_loss() -> None:
    fleet = Fleet((0, Overloaded("full")))
    with pytest.raises(Overloaded):
        await Watched(fleet).pieces()
    fleet = Fleet((4, PeerLost("died")), (0, Overloaded("full")), (0, Overloaded("full")))
    assert text(await Watched(fleet).pieces()) == TEXT


@pytest.mark.parametrize("error", [RequestError("wrong", "x"), RuntimeError("a bug")])
async def test_other_errors_are_not_tried_again(error: Exception) -> None:
    fleet = Fleet((2, error))
    with pytest.raises(type(error)):
        await Watched(fleet).pieces()
    assert len(fleet.asks) == 1


@pytest.mark.parametrize(
    "fleet",
    [
        lambda: Fleet((5, PeerLost("died")), down=10**9),
        lambda: Fleet((5, PeerLost("died")), *[(0, EngineStopped("no"))] * 1000),
        lambda: Fleet((5, PeerLost("died")), *[(0, Overloaded("full"))] * 1000),
    ],
)
async def test_patience_ends(fleet: Callable[[], Fleet]) -> None:
    watched = Watched(fleet(), deadline_s=0.3)
    with pytest.raises(PeerLost, match=r"within 0.3 s \(serving.failover_s\); 5 of its tokens"):
        await watched.pieces()
    assert watched.notes[-1] == "given up"


async def test_an_engine_that_is_silent_after_a_loss_is_waited_for_until_the_deadline() -> None:
    class Silent(Fleet):
        async def generate(self, wanted: Ask) -> AsyncGenerator[Piece, None]:
            async with aclosing(super().generate(wanted)) as pieces:
                async for piece in pieces:
                    if wanted.attempt:
                        await asyncio.sleep(60)
                    yield piece

    fleet = Silent((5, PeerLost("died")))
    with pytest.raises(PeerLost, match=r"within 0\.3 s"):
        await Watched(fleet, deadline_s=0.3).pieces()
    assert fleet.open == 0


@pytest.mark.parametrize("cut", [0, 3])
async def test_what_came_with_the_first_piece_does_not_come_again(cut: int) -> None:
    fleet = Fleet((cut, PeerLost("died")))
    await Watched(fleet).pieces(ask(echo=True, stream=False))
    assert fleet.asks[0].echo
    assert not fleet.asks[0].stream
    assert fleet.asks[1].echo == (cut == 0)
    assert fleet.asks[1].stream


async def test_each_of_a_group_goes_on_by_itself() -> None:
    fleet = Fleet((4, PeerLost("died")))
    watched = Watched(fleet)
    told: dict[int, str] = {0: "", 1: "", 2: ""}
    async for index, piece in pieces_of(watched.backend, [ask("a", group="g"), ask("b", group="g"), ask("c")]):
        told[index] += piece.text
    assert set(told.values()) == {TEXT}
    assert len(fleet.asks) == 6


@pytest.mark.parametrize("after", [0.0, 0.05])
async def test_a_reader_who_leaves_meanwhile_leaves_nothing(after: float) -> None:
    fleet = Fleet((4, PeerLost("died")), down=10**9)
    reading = asyncio.ensure_future(Watched(fleet, deadline_s=60.0).pieces())
    await asyncio.sleep(0.05 + after)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert fleet.open == 0
    looks = fleet.looks
    await asyncio.sleep(0.02)
    assert fleet.looks == looks


async def test_an_answer_that_ends_without_its_last_piece_is_taken_up_again() -> None:
    class Cut(Fleet):
        async def generate(self, wanted: Ask) -> AsyncGenerator[Piece, None]:
            async with aclosing(super().generate(wanted)) as pieces:
                async for piece in pieces:
                    yield piece
                    if not wanted.attempt:
                        return

    assert text(await Watched(Cut()).pieces()) == TEXT


def test_patience_of_zero_ends_with_the_first_engine() -> None:
    fleet = Fleet((2, PeerLost("died")))
    with pytest.raises(OutriderError, match="after 1 lost engines"):
        asyncio.run(Watched(fleet, failovers=0).pieces())
