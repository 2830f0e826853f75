"""Talks to a served model: over HTTP from anywhere, or over a Serve handle from inside the cluster.

Knows: the two ways to carry a body, and their deadlines.
Refuses to know: what is in a body; options are the fields of the OpenAI API and of our extensions.

    Client("http://127.0.0.1:8000").chat([{"role": "user", "content": "Hello"}]).text
    for chunk in Client.from_handle(serve.get_app_handle("outrider")).complete("def f", stream=True): ...

Errors are those of cluster.errors, whichever way they travelled.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from typing import Any, Literal, overload

from deploy.carriers import AsyncCarrier, AsyncHttp, Carrier, Http
from deploy.results import Answer, Chunk, Json, Model

Messages = Sequence[dict[str, Any]]
Prompt = str | Sequence[str] | Sequence[int]

#: Longest silence of the server before the call is given up, in seconds; a whole answer is one silence.
SILENCE_S = 600.0


class Client:
    """Calls that wait. `silence_s` bounds every wait for the server."""

    def __init__(self, base_url: str, silence_s: float = SILENCE_S) -> None:
        self._carrier: Carrier = Http(base_url, silence_s)

    @classmethod
    def from_handle(cls, handle: Any, silence_s: float = SILENCE_S) -> Client:
        """Over a Serve handle of the application, as `serve.get_app_handle` gives; not inside an event loop."""
        from deploy.handles import HandleCarrier  # needs ray, which a caller over HTTP need not have

        client = cls.__new__(cls)
        client._carrier = HandleCarrier(handle, silence_s)
        return client

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **options: Any) -> Answer: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Any) -> Generator[Chunk, None, None]: ...
    def chat(self, messages: Messages, *, stream: bool = False, **options: Any) -> Any:
        """Continue a conversation. Streamed, closing the iterator cancels the request."""
        return self._call("chat", {"messages": list(messages), **options}, stream)

    @overload
    def complete(self, prompt: Prompt, *, stream: Literal[False] = False, **options: Any) -> Answer: ...
    @overload
    def complete(self, prompt: Prompt, *, stream: Literal[True], **options: Any) -> Generator[Chunk, None, None]: ...
    def complete(self, prompt: Prompt, *, stream: bool = False, **options: Any) -> Any:
        """Continue text (or token ids, or each of several texts) as it stands."""
        return self._call("text", _prompted(prompt, options), stream)

    def models(self) -> list[Model]:
        return [Model.read(body) for body in self._carrier.look("models")["data"]]

    def health(self) -> Json:
        """{"status": "ok", "model": ..., "engine": counts}; raises PeerLost or EngineStopped when unwell."""
        return self._carrier.look("health")

    def close(self) -> None:
        self._carrier.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, endpoint: str, body: Json, stream: bool) -> Answer | Generator[Chunk, None, None]:
        if not stream:
            return Answer.read(self._carrier.whole(endpoint, body))
        return self._read(self._carrier.chunks(endpoint, _streamed(body)))

    def _read(self, chunks: Generator[Json, None, None]) -> Generator[Chunk, None, None]:
        with closing(chunks):
            for chunk in chunks:
                yield Chunk.read(chunk)


class AsyncClient:
    """The calls of Client for an event loop; awaiting a streamed call gives an async iterator."""

    def __init__(self, base_url: str, silence_s: float = SILENCE_S) -> None:
        self._carrier: AsyncCarrier = AsyncHttp(base_url, silence_s)

    @classmethod
    def from_handle(cls, handle: Any, silence_s: float = SILENCE_S) -> AsyncClient:
        """Over a Serve handle of the application, as `serve.get_app_handle` gives."""
        from deploy.handles import AsyncHandleCarrier  # needs ray, which a caller over HTTP need not have

        client = cls.__new__(cls)
        client._carrier = AsyncHandleCarrier(handle, silence_s)
        return client

    @overload
    async def chat(self, messages: Messages, *, stream: Literal[False] = False, **options: Any) -> Answer: ...
    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Any
    ) -> AsyncGenerator[Chunk, None]: ...
    async def chat(self, messages: Messages, *, stream: bool = False, **options: Any) -> Any:
        """Continue a conversation. Streamed, closing the iterator cancels the request."""
        return await self._call("chat", {"messages": list(messages), **options}, stream)

    @overload
    async def complete(self, prompt: Prompt, *, stream: Literal[False] = False, **options: Any) -> Answer: ...
    @overload
    async def complete(
        self, prompt: Prompt, *, stream: Literal[True], **options: Any
    ) -> AsyncGenerator[Chunk, None]: ...
    async def complete(self, prompt: Prompt, *, stream: bool = False, **options: Any) -> Any:
        """Continue text (or token ids, or each of several texts) as it stands."""
        return await self._call("text", _prompted(prompt, options), stream)

    async def models(self) -> list[Model]:
        return [Model.read(body) for body in (await self._carrier.look("models"))["data"]]

    async def health(self) -> Json:
        """As Client.health."""
        return await self._carrier.look("health")

    async def close(self) -> None:
        await self._carrier.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, endpoint: str, body: Json, stream: bool) -> Answer | AsyncGenerator[Chunk, None]:
        if not stream:
            return Answer.read(await self._carrier.whole(endpoint, body))
        return self._read(self._carrier.chunks(endpoint, _streamed(body)))

    async def _read(self, chunks: AsyncGenerator[Json, None]) -> AsyncGenerator[Chunk, None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield Chunk.read(chunk)


def _prompted(prompt: Prompt, options: Json) -> Json:
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **options}


def _streamed(body: Json) -> Json:
    return {"stream_options": {"include_usage": True}, **body, "stream": True}
