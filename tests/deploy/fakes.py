"""A backend that spells out what it was asked, one letter a piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from cluster.messages import SourceCount, Statistics
from deploy.asks import Ask, Card, Piece, Spelled


class FakeBackend:
    """Answers every ask with `text`; fails before piece `fail_at` with `error`."""

    def __init__(self, text: str = "hello", error: Exception | None = None, fail_at: int = 0) -> None:
        self.text = text
        self.error = error
        self.fail_at = fail_at
        self.pause_s = 0.0
        self.asks: list[Ask] = []
        self.closed: list[str] = []

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        self.asks.append(ask)
        said = self.text[: ask.sampling.max_tokens]
        try:
            for i, letter in enumerate(said):
                if self.error is not None and i == self.fail_at:
                    raise self.error
                await asyncio.sleep(self.pause_s)
                yield self._piece(ask, i, letter, "stop" if i == len(said) - 1 else None)
        finally:
            self.closed.append(ask.id)

    def _piece(self, ask: Ask, i: int, letter: str, finish: Any) -> Piece:
        spelled = Spelled(ord(letter), letter, letter.encode(), -0.5, (Spelled(0, "z", b"z", -1.5),))
        figures = Statistics(7, 3, i + 1, i + 1, 2 * i, i, (i,), (2 * i,), by_source=(SourceCount("lookup", 2 * i, i),))
        return Piece(letter, (ord(letter),), (spelled,) if ask.sampling.logprobs is not None else (), finish, figures)

    async def card(self) -> Card:
        return Card("fake", 1, 100, {"dtype": "float32"})

    async def status(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"running": 0}
