"""Carries bodies to a server over HTTP and answers back.

Knows: paths, deadlines, server-sent events, and which error a status tells of.
Refuses to know: what is in a body.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, Protocol

import httpx

from cluster.errors import OutriderError, PeerLost
from deploy.openai.faults import restore
from deploy.results import Json

PATHS: Mapping[str, str] = MappingProxyType(
    {"chat": "/v1/chat/completions", "text": "/v1/completions", "models": "/v1/models", "health": "/health"}
)
#: Longest a connection may take to be made, and a question about state to be answered, in seconds.
CONNECT_S, LOOK_S = 10.0, 15.0

What = Literal["models", "health"]


class Carrier(Protocol):
    """Carries bodies and answers, waiting in this thread."""

    def whole(self, endpoint: str, body: Json) -> Json: ...
    def chunks(self, endpoint: str, body: Json) -> Generator[Json, None, None]: ...
    def look(self, what: What) -> Json: ...
    def close(self) -> None: ...


class AsyncCarrier(Protocol):
    """The same for an event loop."""

    async def whole(self, endpoint: str, body: Json) -> Json: ...
    def chunks(self, endpoint: str, body: Json) -> AsyncGenerator[Json, None]: ...
    async def look(self, what: What) -> Json: ...
    async def close(self) -> None: ...


class Http:
    """See Carrier."""

    def __init__(self, base_url: str, silence_s: float) -> None:
        self._http = httpx.Client(base_url=base_url, timeout=httpx.Timeout(silence_s, connect=CONNECT_S))

    def whole(self, endpoint: str, body: Json) -> Json:
        with _lost():
            return _read(self._http.post(PATHS[endpoint], json=body))

    def chunks(self, endpoint: str, body: Json) -> Generator[Json, None, None]:
        with _lost(), self._http.stream("POST", PATHS[endpoint], json=body) as response:
            if response.status_code != 200:
                response.read()
                _read(response)
            events = _Events()
            for line in response.iter_lines():
                event = events.read(line)
                if event is not None:
                    yield event
            events.end()

    def look(self, what: What) -> Json:
        with _lost():
            return _read(self._http.get(PATHS[what], timeout=LOOK_S))

    def close(self) -> None:
        self._http.close()


class AsyncHttp:
    """See AsyncCarrier."""

    def __init__(self, base_url: str, silence_s: float) -> None:
        self._http = httpx.AsyncClient(base_url=base_url, timeout=httpx.Timeout(silence_s, connect=CONNECT_S))

    async def whole(self, endpoint: str, body: Json) -> Json:
        with _lost():
            return _read(await self._http.post(PATHS[endpoint], json=body))

    async def chunks(self, endpoint: str, body: Json) -> AsyncGenerator[Json, None]:
        with _lost():
            async with self._http.stream("POST", PATHS[endpoint], json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    _read(response)
                events = _Events()
                async for line in response.aiter_lines():
                    event = events.read(line)
                    if event is not None:
                        yield event
                events.end()

    async def look(self, what: What) -> Json:
        with _lost():
            return _read(await self._http.get(PATHS[what], timeout=LOOK_S))

    async def close(self) -> None:
        await self._http.aclose()


class _Events:
    """Reads the lines of one event stream and notices when it ends too early."""

    def __init__(self) -> None:
        self._done = False

    def read(self, line: str) -> Json | None:
        if not line.startswith("data: "):
            return None
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self._done = True
            return None
        event: Json = json.loads(data)
        if "error" in event:
            self._done = True
            raise restore(500, event)
        return event

    def end(self) -> None:
        if not self._done:
            raise PeerLost("the server ended the stream before the answer was complete")


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        raise PeerLost(f"the server did not answer in time ({type(error).__name__})") from error
    except httpx.TransportError as error:
        raise PeerLost(f"the connection to the server failed: {error}") from error


def _read(response: httpx.Response) -> Json:
    try:
        body: Any = response.json()
    except ValueError:
        body = response.text
    if response.status_code != 200:
        raise restore(response.status_code, body)
    if not isinstance(body, dict):
        raise OutriderError(f"the server's answer is not what was expected: {str(body)[:200]}")
    return body
