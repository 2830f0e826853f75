"""An engine behind a Serve handle: its pieces, its signs of life, and what follows when there are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from cluster.errors import EngineStopped, PeerLost
from cluster.request import Sampling
from deploy.asks import Ask, Piece

# Not ours to mend: what Serve's own modules warn of when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Response:
    """A stream of pieces; a number among them is a pause in seconds."""

    def __init__(self, items: list[Any]) -> None:
        self._items = self._run(items)
        self.cancelled = False

    async def _run(self, items: list[Any]) -> AsyncGenerator[Any, None]:
        for item in items:
            if isinstance(item, float):
                await asyncio.sleep(item)
            elif isinstance(item, Exception):
                raise item
            else:
                yield item

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._items)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A Serve handle whose replica answers every ask with `response`."""

    def __init__(self, *items: Any) -> None:
        self.response = Response(list(items))
        self.generate = self

    def options(self, stream: bool) -> Handle:
        return self

    def remote(self, ask: Ask) -> Response:
        return self.response


QUIET, TOLD, LAST = Piece("", ()), Piece("a", (1,)), Piece("", (), finish="stop")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy import transport

    monkeypatch.setattr(transport, "SILENT_S", 0.2)


async def heard(handle: Handle) -> list[Piece]:
    from deploy.transport import EngineHandle

    engine: Any = EngineHandle(handle)  # type: ignore[arg-type]
    return [piece async for piece in engine.generate(Ask("a", "x", Sampling()))]


async def test_signs_of_life_are_not_passed_on_and_keep_a_slow_answer_going() -> None:
    handle = Handle(QUIET, 0.12, QUIET, 0.12, TOLD, 0.12, QUIET, 0.12, LAST)
    assert await heard(handle) == [TOLD, LAST]
    assert handle.response.cancelled


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ((TOLD, 5.0, LAST), PeerLost),
        ((QUIET, 5.0, LAST), PeerLost),
        ((5.0, TOLD), EngineStopped),  # nobody took it: no engine counts as lost under it
    ],
)
async def test_silence_is_a_lost_engine(items: tuple[Any, ...], error: type[Exception]) -> None:
    handle = Handle(*items)
    with pytest.raises(error, match=r"0\.2 s"):
        await heard(handle)
    assert handle.response.cancelled


async def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        await heard(Handle(TOLD, ZeroDivisionError()))
