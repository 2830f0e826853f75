"""A served model as clients see it: real Ray, real engine, tiny random weights."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import openai
import pytest

from cluster.errors import PromptTooLong, RequestError, UnknownModel
from deploy.client import AsyncClient, Client
from deploy.local import LocalServing, ServeFile
from tests.e2e.conftest import healthy, pid_of, pids_of, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    # Not ours to mend: Ray leaves pipes and log files for the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

TURNS: Any = [{"role": "user", "content": "the sea and the sea and the sea"}]
VERIFIER = "ray::VerifierProcess"
REPLICA = "ray::ServeReplica:outrider:Engine"


@pytest.fixture(scope="module")
def file(tiny_config: Callable[..., Path]) -> ServeFile:
    return ServeFile.read(tiny_config())


@pytest.fixture(scope="module")
def url(file: ServeFile) -> Iterator[str]:
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    with LocalServing(file, lambda _: None, ready_s=90.0):
        yield file.url
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    for _ in range(3):  # here, where the marks above hold, and not at the end of the session
        gc.collect()


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, silence_s=60.0) as made:
        yield made


@pytest.fixture
def sync(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as made:
        yield made


def engine(url: str) -> dict[str, Any]:
    body = healthy(url)
    assert body is not None
    return dict(body["engine"])


def test_the_openai_client_chats_streams_and_stops(sync: openai.OpenAI) -> None:
    assert [model.id for model in sync.models.list()] == ["tiny"]
    whole = sync.chat.completions.create(model="tiny", messages=TURNS, temperature=0, max_tokens=24)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    stream = sync.chat.completions.create(
        model="tiny", messages=TURNS, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    stop = text[len(text) // 2 :][:3]
    cut = sync.chat.completions.create(model="tiny", messages=TURNS, temperature=0, max_tokens=24, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == text[: text.index(stop)]


async def test_the_asynchronous_openai_client_does_the_same(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as made:
        whole = await made.completions.create(
            model="tiny", prompt="def f", seed=3, max_tokens=16, logprobs=2, extra_body={"ignore_eos": True}
        )
        stream = await made.completions.create(
            model="tiny", prompt="def f", seed=3, max_tokens=16, stream=True, extra_body={"ignore_eos": True}
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.token_logprobs or ()) == 16


def test_a_prompt_is_measured_without_an_answer(sync: openai.OpenAI) -> None:
    """What the model found of each token when it chose them is what it finds of them as a prompt."""
    said = sync.completions.create(model="tiny", prompt="def f", seed=3, max_tokens=8, logprobs=1, echo=True)
    again = sync.completions.create(model="tiny", prompt=said.choices[0].text, max_tokens=0, logprobs=1, echo=True)
    assert again.choices[0].text == said.choices[0].text
    assert said.choices[0].logprobs is not None
    assert again.choices[0].logprobs is not None
    first, *rest = again.choices[0].logprobs.token_logprobs or ()
    assert first is None
    if again.choices[0].logprobs.tokens == said.choices[0].logprobs.tokens:  # the text may be cut otherwise
        assert rest == pytest.approx((said.choices[0].logprobs.token_logprobs or [])[1:], abs=1e-3)
    assert again.usage is not None
    assert (again.usage.completion_tokens, again.usage.prompt_tokens) == (0, len(rest) + 1)


def test_refusals_have_their_status(sync: openai.OpenAI, url: str) -> None:
    ask: Any = sync.completions.create
    with pytest.raises(openai.NotFoundError, match="not served here"):
        ask(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(model="tiny", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(model="tiny", prompt="word " * 2000)
    assert refusal.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="ids are 0 to"):
        ask(model="tiny", prompt=[10**6])
    with pytest.raises(openai.BadRequestError, match="not configured"):
        ask(model="tiny", prompt="x", extra_body={"speculation": {"method": "psychic"}}, stream=True)
    assert httpx.post(f"{url}/v1/completions", content=b"{").status_code == 400


def test_speculation_changes_figures_never_text(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "seed": 5, "temperature": 0.2}
    fast = client.chat(TURNS, **options)
    plain = client.chat(TURNS, speculation={"enabled": False}, **options)
    assert fast.text == plain.text
    assert fast.usage.drafted > 0
    assert plain.usage.drafted == 0
    assert fast.usage.rounds + fast.usage.accepted == fast.usage.completion_tokens
    assert sum(fast.usage.accepted_by_position) == fast.usage.accepted
    assert sum(source.drafted for source in fast.usage.by_source.values()) == fast.usage.drafted


def test_every_way_in_says_the_same(client: Client, url: str) -> None:
    from ray import serve

    options: dict[str, Any] = {"max_tokens": 20, "seed": 11}
    whole = client.complete("the", **options)
    inside = Client.from_handle(serve.get_app_handle("outrider"), silence_s=60.0)
    assert inside.complete("the", **options).text == whole.text
    assert "".join(chunk.text for chunk in inside.complete("the", stream=True, **options)) == whole.text
    assert "".join(chunk.text for chunk in client.complete("the", stream=True, **options)) == whole.text
    assert inside.models() == client.models()
    assert inside.health()["status"] == "ok"
    with pytest.raises(PromptTooLong):
        inside.complete("word " * 2000)
    with pytest.raises(UnknownModel):
        client.complete("x", model="other")
    with pytest.raises(RequestError) as refusal:
        list(inside.complete("x", stream=True, top_p=7))
    assert refusal.value.param == "top_p"
    inside.close()

    async def asynchronously() -> list[str]:
        said = []
        outside = AsyncClient(url, silence_s=60.0)
        for way in (outside, AsyncClient.from_handle(serve.get_app_handle("outrider"), silence_s=60.0)):
            async with way:
                said.append((await way.complete("the", **options)).text)
                said.append("".join([c.text async for c in await way.complete("the", stream=True, **options)]))
                assert (await way.models())[0].id == "tiny"
        return said

    assert asyncio.run(asynchronously()) == [whole.text] * 4


def test_equal_seeds_give_equal_text_under_load(client: Client, url: str) -> None:
    def one(seed: int) -> str:
        return client.complete("on and on", max_tokens=24, seed=seed % 4, n=1 + seed % 2).text

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(one, range(24)))
    assert [texts[i] == texts[i % 4] for i in range(24)] == [True] * 24
    assert len(set(texts)) > 1
    assert engine(url)["blocks_owned"] == 0


@pytest.mark.parametrize("way", ["http", "handle"])
def test_a_client_that_leaves_frees_its_blocks(client: Client, url: str, way: str) -> None:
    from ray import serve

    asking = client if way == "http" else Client.from_handle(serve.get_app_handle("outrider"), silence_s=60.0)
    before = engine(url)["steps"]
    chunks = asking.complete("x", stream=True, max_tokens=450, ignore_eos=True, speculation={"enabled": False})
    for _ in range(3):
        next(chunks)
    assert engine(url)["blocks_owned"] > 0
    chunks.close()
    left = time.monotonic()
    wait_until(lambda: engine(url)["blocks_owned"] == 0, 5.0, "blocks of an abandoned request are free")
    assert time.monotonic() - left < 2.0
    now = engine(url)
    assert now["running"] == now["waiting"] == 0
    assert now["steps"] - before < 440, "the abandoned answer was computed to its end"
    if way == "handle":
        asking.close()


def test_a_whole_answer_nobody_waits_for_is_dropped(url: str) -> None:
    before = engine(url)["steps"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{url}/v1/completions",
            json={"prompt": "x", "max_tokens": 450, "ignore_eos": True, "speculation": {"enabled": False}},
            timeout=0.15,
        )
    wait_until(lambda: engine(url)["blocks_owned"] == 0, 5.0, "blocks of an abandoned request are free")
    assert engine(url)["steps"] - before < 440


LONG: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True, "temperature": 1.0}


def lost_under(url: str, title: str, blow: int, calls: int, client: Client) -> list[tuple[str, int]]:
    """Text and failovers of `calls` streams, the process called `title` given a signal once all of them have begun."""
    begun = Barrier(calls + 1)

    def one(seed: int) -> tuple[str, int]:
        said, usage, stream = "", None, client.complete("on and on", stream=True, seed=seed, **LONG)
        for count, chunk in enumerate(stream):
            if count == 1:
                begun.wait(60.0)
            said += chunk.text
            usage = chunk.usage or usage
        assert usage is not None
        assert usage.completion_tokens == LONG["max_tokens"]
        return said, usage.failovers

    with ThreadPoolExecutor(calls) as pool:
        streams = [pool.submit(one, seed) for seed in range(calls)]
        begun.wait(60.0)
        pid = pid_of(title, os.getpid())
        assert pid is not None
        os.kill(pid, blow)
        told = [stream.result(100.0) for stream in streams]
    assert pid_of(VERIFIER, os.getpid()) not in (None, pid)
    assert engine(url)["blocks_owned"] == 0
    return told


@pytest.mark.parametrize(
    ("title", "blow", "calls"),
    [
        (VERIFIER, signal.SIGKILL, 20),
        (VERIFIER, signal.SIGSTOP, 4),
        (REPLICA, signal.SIGKILL, 4),
        (REPLICA, signal.SIGSTOP, 4),
    ],
)
def test_streams_outlive_their_engine(client: Client, url: str, title: str, blow: int, calls: int) -> None:
    """Killed or frozen with answers under way, at temperature 1: every client reads what it would have read."""
    with ThreadPoolExecutor(calls) as pool:
        whole = list(pool.map(lambda seed: client.complete("on and on", seed=seed, **LONG).text, range(calls)))
    told = lost_under(url, title, blow, calls, client)
    assert [text for text, _ in told] == whole
    assert sum(failovers > 0 for _, failovers in told) > calls // 2  # the others were through before the signal
    wait_until(
        lambda: len(pids_of(VERIFIER, os.getpid())) == 1, 30.0, "one engine is left, and no process of the lost one"
    )


def test_whole_answers_and_handles_outlive_it_too(client: Client, url: str) -> None:
    from ray import serve

    options: dict[str, Any] = {**LONG, "n": 2, "seed": 5}
    whole = client.complete("far", **options)
    inside = Client.from_handle(serve.get_app_handle("outrider"), silence_s=60.0)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(way.complete, "far", **options) for way in (client, inside)]
        wait_until(lambda: engine(url)["running"] == 4, 10.0, "both are under way")
        pid = pid_of(VERIFIER, os.getpid())
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        told = [answer.result(100.0) for answer in answers]
    for answer in told:
        assert [choice.text for choice in answer.choices] == [choice.text for choice in whole.choices]
    assert sum(answer.usage.failovers for answer in told) > 0
    inside.close()


def test_a_client_that_leaves_while_its_engine_is_lost_leaves_nothing(client: Client, url: str) -> None:
    chunks = client.complete("x", stream=True, **LONG)
    next(chunks)
    pid = pid_of(VERIFIER, os.getpid())
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    chunks.close()
    wait_until(lambda: healthy(url), 60.0, "a new engine answers")
    now = engine(url)
    assert (now["running"], now["waiting"], now["blocks_owned"]) == (0, 0, 0)
