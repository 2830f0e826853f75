"""The endpoints without HTTP: a checked body in, JSON or chunks of JSON out.

Knows: how a body becomes asks, asks become pieces and pieces become a response.
Refuses to know: HTTP (routes) and the engine (a Backend). Both the routes and the handle client
call this, so a call over a Serve handle says exactly what the same call over HTTP says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from cluster.errors import EngineStopped, PeerLost, RequestError, UnknownModel
from deploy.asks import Ask, Backend, Card, Piece
from deploy.openai.sampling import in_api_words
from deploy.openai.schema import ChatBody, Common, TextBody, read
from deploy.openai.stream import ChatWriter, Json, Layout, TextWriter, Writer

KINDS: Mapping[str, tuple[type[Common], type[Writer]]] = {
    ChatBody.endpoint: (ChatBody, ChatWriter),
    TextBody.endpoint: (TextBody, TextWriter),
}
#: Longest wait for the next piece of an answer, queueing included, in seconds.
PIECE_S = 600.0


@dataclass(frozen=True, slots=True)
class Service:
    """Answers bodies through `backend`.

    name: the model id served. max_tokens: answer length when a body names none.
    """

    backend: Backend
    name: str
    max_tokens: int

    def check(self, endpoint: str, body: Any) -> Common:
        """Read a body of `endpoint` ("chat" or "text"). RequestError or UnknownModel."""
        kind, _ = KINDS[endpoint]
        checked = read(kind, body)
        self.check_model(checked.model)
        return checked

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise UnknownModel(f"the model {model!r} is not served here; this server has {self.name!r}", "model")

    async def whole(self, body: Common) -> Json:
        """The complete response."""
        asks = body.asks(self.max_tokens)
        writer = self._writer(body, asks)
        async with aclosing(pieces_of(self.backend, asks)) as pieces:
            async for index, piece in pieces:
                writer.add(index, piece)
        return writer.whole()

    async def chunks(self, body: Common) -> AsyncGenerator[Json, None]:
        """The response in chunks. Nothing is yielded before the engine has taken the request."""
        asks = body.asks(self.max_tokens)
        writer = self._writer(body, asks)
        opened = False
        async with aclosing(pieces_of(self.backend, asks)) as pieces:
            async for index, piece in pieces:
                if not opened:
                    for opening in writer.openings():
                        yield opening
                    opened = True
                chunk = writer.chunk(index, piece)
                if chunk is not None:
                    yield chunk
        if body.wants_usage:
            yield writer.usage_chunk()

    async def models(self) -> Json:
        return {"object": "list", "data": [model_json(await self.backend.card())]}

    async def model(self, name: str) -> Json:
        self.check_model(name)
        return model_json(await self.backend.card())

    async def health(self) -> Json:
        return {"status": "ok", "model": self.name, "engine": await self.backend.status()}

    def _writer(self, body: Common, asks: list[Ask]) -> Writer:
        _, kind = KINDS[body.endpoint]
        logprobs = body.wanted_logprobs() is not None
        layout = Layout(
            count=len(asks),
            per_prompt=body.per_prompt,
            shown=body.n or 1,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs is not None,
            usage_last=body.wants_usage,
            silent=body.silent,
        )
        return kind(self.name, layout)


def model_json(card: Card) -> Json:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "outrider",
        "max_context": card.max_context,
        "details": card.details,
    }


async def pieces_of(backend: Backend, asks: list[Ask]) -> AsyncGenerator[tuple[int, Piece], None]:
    """(choice, piece) of all asks as they come. Closing it, or an error of one, ends all of them."""
    if len(asks) == 1:
        async with aclosing(_one(backend, asks[0])) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()

    async def pump(index: int, ask: Ask) -> None:
        async with aclosing(_one(backend, ask)) as pieces:
            async for piece in pieces:
                arrived.put_nowait((index, piece))
        arrived.put_nowait((index, None))

    pumps = [asyncio.ensure_future(pump(index, ask)) for index, ask in enumerate(asks)]
    try:
        left = len(pumps)
        while left:
            getter = asyncio.ensure_future(arrived.get())
            await asyncio.wait([getter, *(p for p in pumps if not p.done())], return_when=asyncio.FIRST_COMPLETED)
            for failed in (p for p in pumps if p.done() and p.exception() is not None):
                getter.cancel()
                failed.result()
            index, news = await getter
            if news is None:
                left -= 1
            else:
                yield index, news
    finally:
        for pump_task in pumps:
            pump_task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _one(backend: Backend, ask: Ask) -> AsyncGenerator[Piece, None]:
    async with aclosing(backend.generate(ask)) as stream:
        while True:
            try:
                async with asyncio.timeout(PIECE_S):
                    piece = await anext(stream, None)
            except TimeoutError:
                raise PeerLost(f"no news of the answer for {PIECE_S:.0f} s") from None
            except RequestError as error:
                raise in_api_words(error) from None
            if piece is None:
                return
            if piece.finish == "abort":
                raise EngineStopped("the answer was ended by the server before it was complete")
            yield piece
