"""The API over HTTP, in front of a fake backend: shapes, statuses, streams that end as they must."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.errors import (
    BrokenInvariant,
    CapacityError,
    EngineStopped,
    OutriderError,
    Overloaded,
    PeerLost,
    PromptTooLong,
    RequestError,
    UnknownModel,
)
from deploy.openai.answer import Service
from deploy.openai.faults import restore
from deploy.openai.routes import openai_app
from tests.deploy.fakes import FakeBackend

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TURNS = [{"role": "user", "content": "hi"}]


class Server:
    """The application without a socket."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.app = openai_app(Service(backend, "fake", 50), lambda error: error)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def events(self, path: str, **body: Any) -> list[Any]:
        response = await self.post(path, stream=True, **body)
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server(FakeBackend())
    yield made
    await made.http.aclose()


async def test_a_whole_chat(server: Server) -> None:
    body = (await server.post(CHAT, messages=TURNS, model="fake")).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 4},
        "outrider": {
            "drafted": 8, "accepted": 4, "rounds": 5, "accepted_by_position": [4], "drafted_by_position": [8],
            "preemptions": 0, "by_source": {"lookup": {"drafted": 8, "accepted": 4}}, "rule": "coupled", "lossy": False,
            "failovers": 0,
        },
    }  # fmt: skip


async def test_a_streamed_chat(server: Server) -> None:
    events = await server.events(CHAT, messages=TURNS, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 5
    chunks = events[:-2]
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_streamed_text_without_usage(server: Server) -> None:
    events = await server.events(TEXT, prompt="hi")
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "hello"
    assert all("usage" not in event for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_keep_their_index(server: Server, stream: bool) -> None:
    if stream:
        events = await server.events(TEXT, prompt=["a", "b"], n=2)
        said = ["", "", "", ""]
        for event in events[:-1]:
            [choice] = event["choices"]
            said[choice["index"]] += choice["text"]
    else:
        body = (await server.post(TEXT, prompt=["a", "b"], n=2)).json()
        said = [choice["text"] for choice in body["choices"]]
        assert body["usage"]["prompt_tokens"] == 14  # each prompt once
        assert body["usage"]["completion_tokens"] == 20
    assert said == ["hello"] * 4
    assert [ask.prompt for ask in server.backend.asks] == ["a", "a", "b", "b"]


async def test_logprobs_of_both_styles(server: Server) -> None:
    chat = (await server.post(CHAT, messages=TURNS, logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in chat["content"]] == list("hello")
    assert chat["content"][0]["bytes"] == [104]
    assert chat["content"][0]["top_logprobs"] == [{"token": "z", "logprob": -1.5, "bytes": [122]}]
    text = (await server.post(TEXT, prompt="x", logprobs=1)).json()["choices"][0]["logprobs"]
    assert text["tokens"] == list("hello")
    assert text["text_offset"] == [0, 1, 2, 3, 4]
    assert text["top_logprobs"][0] == {"z": -1.5, "h": -0.5}  # the token itself, likely or not
    events = await server.events(TEXT, prompt="x", logprobs=1)
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events[:-1]] == [[0], [1], [2], [3], [4]]


async def test_models(server: Server) -> None:
    body = (await server.http.get("/v1/models")).json()
    assert body["object"] == "list"
    assert body["data"][0]["id"] == "fake"
    assert (await server.http.get("/v1/models/fake")).json()["owned_by"] == "outrider"
    assert (await server.http.get("/v1/models/other/model")).status_code == 404


async def test_health(server: Server) -> None:
    assert (await server.http.get("/health")).json() == {"status": "ok", "model": "fake", "engine": {"running": 0}}
    server.backend.error = PeerLost("gone")
    assert (await server.http.get("/health")).status_code == 503


FAILURES = [
    (PromptTooLong("long", "prompt"), 400, "context_length_exceeded"),
    (UnknownModel("who", "model"), 404, "model_not_found"),
    (RequestError("bad", "seed"), 400, "invalid_request"),
    (Overloaded("full"), 429, "overloaded"),
    (EngineStopped("over"), 503, "engine_stopped"),
    (PeerLost("gone"), 503, "peer_lost"),
    (CapacityError("small"), 503, "no_capacity"),
    (BrokenInvariant("bug"), 500, "broken_invariant"),
    (ZeroDivisionError("bug"), 500, "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), FAILURES)
async def test_an_error_before_the_first_byte_is_a_status(
    server: Server, error: Exception, status: int, code: str, stream: bool
) -> None:
    server.backend.error = error
    response = await server.post(CHAT, messages=TURNS, stream=stream)
    assert response.status_code == status
    detail = response.json()["error"]
    assert detail == {
        "message": str(error),
        "type": detail["type"],
        "param": getattr(error, "param", None),
        "code": code,
    }
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert len(server.backend.closed) == 1
    back = restore(status, response.json())
    assert isinstance(back, type(error) if isinstance(error, OutriderError) else OutriderError)
    assert str(back) == str(error)


async def test_an_error_after_the_first_byte_is_an_event(server: Server) -> None:
    server.backend.error, server.backend.fail_at = PeerLost("gone"), 2
    events = await server.events(TEXT, prompt="x")
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["h", "e"]
    assert events[-1]["error"]["code"] == "peer_lost"


async def test_one_failing_choice_ends_the_others(server: Server) -> None:
    server.backend.error, server.backend.fail_at, server.backend.pause_s = PeerLost("gone"), 2, 0.005
    assert (await server.post(TEXT, prompt="x", n=3)).status_code == 503
    assert len(server.backend.closed) == 3


@pytest.mark.parametrize(
    ("raw", "status"),
    [(b"{", 400), (b"", 400), (b"\xff\xfe", 400), (b"[]", 400), (b'{"messages": "hi"}', 400)],
)
async def test_bad_bodies(server: Server, raw: bytes, status: int) -> None:
    response = await server.http.post(CHAT, content=raw)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert not server.backend.asks


async def test_unknown_models_and_paths_are_404(server: Server) -> None:
    response = await server.post(CHAT, messages=TURNS, model="gpt")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "fake" in response.json()["error"]["message"]
    response = await server.http.get("/nowhere")
    assert response.status_code == 404
    assert "error" in response.json()
    assert (await server.http.get(CHAT)).status_code == 405


async def test_a_leaving_client_closes_every_source(server: Server) -> None:
    server.backend.text, server.backend.pause_s = "x" * 40, 0.01
    left, sent = asyncio.Event(), 0
    body = json.dumps({"prompt": "a", "n": 2, "stream": True}).encode()
    request: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if request:
            return request.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent
        sent += message["type"] == "http.response.body"
        if sent == 3:
            left.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": TEXT, "raw_path": TEXT.encode(), "query_string": b"", "headers": [], "scheme": "http",
        "root_path": "", "client": ("test", 1), "server": ("test", 80),
    }  # fmt: skip
    async with asyncio.timeout(5):
        await server.app(scope, receive, send)
    assert sent < 40
    assert len(server.backend.closed) == 2


async def test_an_event_is_one_line_whatever_is_in_it() -> None:
    """Readers of lines also break at these."""
    odd = "a\x0b\x0c\x1c\x85\u2028\u2029\rb"
    server = Server(FakeBackend(odd))
    response = await server.post(TEXT, prompt="x", stream=True)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == odd
    await server.http.aclose()
