"""The OpenAI API over HTTP.

Knows: paths, status codes, server-sent events, and that an error before the first byte is a status
while one after it can only be an event.
Refuses to know: what is in a body or an answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.errors import RequestError
from deploy.openai.answer import Service
from deploy.openai.faults import fault_of
from deploy.openai.stream import Json

Handler = Callable[[], Awaitable[Response]]


def openai_app(service: Service, translate: Callable[[BaseException], BaseException]) -> FastAPI:
    """An ASGI application. `translate` turns what the transport raises into errors of ours."""
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, openapi_url=None)

    async def guarded(answer: Handler) -> Response:
        try:
            return await answer()
        except Exception as error:  # the outermost place of a request: every error becomes a response
            return refusal(translate(error))

    def completion(endpoint: str) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            return await guarded(lambda: _complete(service, endpoint, request, translate))

        return route

    def reading(read: Callable[[], Awaitable[Json]]) -> Awaitable[Response]:
        async def answer() -> Response:
            return JSONResponse(await read())

        return guarded(answer)

    async def models() -> Response:
        return await reading(service.models)

    async def model(name: str) -> Response:
        return await reading(lambda: service.model(name))

    async def health() -> Response:
        return await reading(service.health)

    async def unserved(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = {"message": str(getattr(error, "detail", error)), "type": "invalid_request_error"}
        return JSONResponse({"error": detail | {"param": None, "code": None}}, status)

    app.add_api_route("/v1/chat/completions", completion("chat"), methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", completion("text"), methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"], response_model=None)
    app.add_api_route("/health", health, methods=["GET"], response_model=None)
    app.add_exception_handler(HTTPException, unserved)
    return app


def refusal(error: BaseException) -> JSONResponse:
    """An error as a response."""
    fault = fault_of(error)
    return JSONResponse(fault.body(error), fault.status, fault.headers)


async def _complete(
    service: Service, endpoint: str, request: Request, translate: Callable[[BaseException], BaseException]
) -> Response:
    body = service.check(endpoint, _parse(await request.body()))
    if not body.streams:
        return JSONResponse(await service.whole(body))
    chunks = service.chunks(body)
    first = await anext(chunks)  # an error here is still a status
    return _Events(_events(first, chunks, translate))


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


async def _events(
    first: Json, rest: AsyncGenerator[Json, None], translate: Callable[[BaseException], BaseException]
) -> AsyncGenerator[str, None]:
    try:
        yield _event(first)
        async for chunk in rest:
            yield _event(chunk)
        yield "data: [DONE]\n\n"
    except Exception as error:  # bytes are out: all that is left is to say so and end
        told = translate(error)
        yield _event(fault_of(told).body(told))
    finally:
        await rest.aclose()


def _event(value: Json) -> str:
    # In ASCII: readers of lines break them at U+0085, U+2028 and others that JSON leaves as they are.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


class _Events(StreamingResponse):
    """Server-sent events whose source is closed however the response ends, a lost client included."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
