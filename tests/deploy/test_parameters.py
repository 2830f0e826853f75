"""Sampling parameters and choices over the API: what reaches the engine, what comes back, what is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.errors import RequestError
from cluster.request import Sampling
from cluster.text.tokenizer import Tokenizer
from deploy.asks import Ask, Echo, Piece, Spelled, Words
from deploy.openai.answer import Service
from deploy.openai.routes import openai_app
from deploy.openai.sampling import in_api_words
from deploy.openai.schema import ChatBody, TextBody, read
from deploy.words import put_in_ids
from tests.deploy.fakes import FakeBackend

TURN = {"role": "user", "content": "hi"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Weighed(FakeBackend):
    """The nth answer says n, with a log-probability by n, and tells of a prompt of three tokens."""

    chances = (-3.0, -1.0, -2.0, -0.5)

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        number = len(self.asks)
        self.asks.append(ask)
        chance = self.chances[number % len(self.chances)]
        told = ask.sampling.prompt_logprobs is not None
        prompt = tuple(
            Spelled(id_, f"t{id_}", b"t", -id_ / 2, (Spelled(9, "t9", b"t", -0.1, rank=1),), 2) for id_ in (1, 2)
        )
        echo = Echo("t0t1t2", Spelled(0, "t0", b"t", None)) if ask.echo else None
        entry = Spelled(number, str(number), b"n", chance)
        logprobs = (entry,) * (number + 1) if ask.sampling.logprobs is not None else ()
        yield Piece(str(number), (number,), logprobs, "stop", prompt_logprobs=prompt if told else (), echo=echo)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    backend = Weighed()
    app = openai_app(Service(backend, "fake", 50), lambda error: error)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        client.backend = backend  # type: ignore[attr-defined]
        yield client


def asks(kind: type = ChatBody, **fields: Any) -> list[Ask]:
    whole = {"messages": [TURN]} if kind is ChatBody else {"prompt": "hi"}
    return read(kind, {**whole, **fields}).asks(100)


@pytest.mark.parametrize("kind", [ChatBody, TextBody])
def test_every_field_reaches_the_engine(kind: type) -> None:
    [ask] = asks(
        kind, seed=1, min_tokens=3, stop_token_ids=[4, 5], include_stop_str_in_output=True, allowed_token_ids=[1, 2],
        bad_words=["no", [7, 8]], prompt_logprobs=2, thinking_token_budget=20, think_end="<end>",
        logits_processors=["mine"], user="me", priority=-2,
    )  # fmt: skip
    assert ask.sampling == Sampling(
        max_tokens=100, seed=1, min_tokens=3, stop_ids=(4, 5), include_stop=True, allowed_ids=(1, 2), prompt_logprobs=2,
        bad_words=("no",), bad_ids=((7, 8),), logits_processors=("mine",),
    )  # fmt: skip
    assert ask.words == Words(20, "<end>")
    assert (ask.key, ask.priority, ask.group) == ("me", -2, "")


def test_every_parameter_of_the_engine_can_be_asked_for() -> None:
    """A field added to Sampling alone would be one that nobody can use."""
    body = read(TextBody, {"prompt": "x", "thinking_token_budget": 1, "bad_words": ["x", [1]]})
    reached = {"thinking_tokens", "think_end"}  # through words
    given = {
        "stop": "a",
        "logit_bias": {"1": 1},
        "logprobs": 1,
        "seed": 1,
        "allowed_token_ids": [1],
        "temperature": 0.5,
        "stop_token_ids": [1],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "min_tokens": 1,
        "top_p": 0.5,
        "prompt_logprobs": 0,
        "logits_processors": ["x"],
        "top_k": 1,
        "min_p": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "max_tokens": 3,
    }
    sampling = body.model_copy(update=given).sampling(100, 1)
    default = Sampling(max_tokens=100)
    names = {field.name for field in dataclasses.fields(Sampling)}
    assert {name for name in names if getattr(sampling, name) != getattr(default, name)} | reached == names


def test_thinking_ends_with_the_usual_mark_unless_another_is_named() -> None:
    assert asks(thinking_token_budget=5)[0].words == Words(5, "</think>")
    assert asks(thinking_token_budget=0, think_end=[3])[0].words == Words(0, (3,))


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatBody, {"min_tokens": -1}, "min_tokens"),
        (ChatBody, {"min_tokens": 11, "max_tokens": 10}, "min_tokens"),
        (ChatBody, {"min_tokens": 1.5}, "min_tokens"),
        (ChatBody, {"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        (ChatBody, {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        (ChatBody, {"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        (ChatBody, {"stop_token_ids": [1] * 65}, "stop_token_ids"),
        (ChatBody, {"allowed_token_ids": []}, "allowed_token_ids"),
        (ChatBody, {"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]"),
        (ChatBody, {"bad_words": [""]}, "bad_words[0]"),
        (ChatBody, {"bad_words": [[]]}, "bad_words[0]"),
        (ChatBody, {"bad_words": "no"}, "bad_words"),
        (ChatBody, {"bad_words": [[1, -1]]}, "bad_words[0][1]"),
        (ChatBody, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (ChatBody, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (ChatBody, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (ChatBody, {"thinking_token_budget": -1}, "thinking_token_budget"),
        (ChatBody, {"think_end": "</think>"}, "think_end"),
        (ChatBody, {"think_end": "", "thinking_token_budget": 1}, "think_end"),
        (ChatBody, {"logits_processors": "mine"}, "logits_processors"),
        (ChatBody, {"logits_processors": ["a", "a"]}, "logits_processors"),
        (ChatBody, {"ignore_eos": 1}, "ignore_eos"),
        (ChatBody, {"min_p": -0.1}, "min_p"),
        (ChatBody, {"min_p": "x"}, "min_p"),
        (ChatBody, {"top_k": 1.5}, "top_k"),
        (ChatBody, {"repetition_penalty": 0}, "repetition_penalty"),
        (ChatBody, {"presence_penalty": 3}, "presence_penalty"),
        (ChatBody, {"frequency_penalty": -3}, "frequency_penalty"),
        (ChatBody, {"user": 3}, "user"),
        (ChatBody, {"priority": "high"}, "priority"),
        (TextBody, {"best_of": 0}, "best_of"),
        (TextBody, {"best_of": 17}, "best_of"),
        (TextBody, {"n": 4, "best_of": 3}, "best_of"),
        (TextBody, {"best_of": 2, "stream": True}, "best_of"),
        (TextBody, {"prompt": ["a"] * 5, "best_of": 8}, "best_of"),
    ],
)
async def test_refusals_are_400_and_name_the_field(
    http: httpx.AsyncClient, kind: type, fields: dict[str, Any], param: str
) -> None:
    path, whole = (CHAT, {"messages": [TURN]}) if kind is ChatBody else (TEXT, {"prompt": "hi"})
    response = await http.post(path, json={**whole, **fields})
    assert response.status_code == 400
    detail = response.json()["error"]
    assert detail["param"] == param
    assert param.partition("[")[0] in detail["message"]
    assert not http.backend.asks  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("engine", "api"),
    [
        ("allowed_ids", "allowed_token_ids"),
        ("bad_ids", "bad_words"),
        ("stop_ids", "stop_token_ids"),
        ("thinking_tokens", "thinking_token_budget"),
        ("logits_processors", "logits_processors"),
    ],
)
async def test_what_the_engine_refuses_is_told_in_the_words_of_the_api(
    http: httpx.AsyncClient, engine: str, api: str
) -> None:
    class Refusing(Weighed):
        async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
            raise RequestError(f"{engine} has token id 99; this model's ids are 0 to 9", engine)
            yield

    app = openai_app(Service(Refusing(), "fake", 50), lambda error: error)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post(TEXT, json={"prompt": "x"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == api
    assert response.json()["error"]["message"].startswith(f"{api} has token id 99")
    assert in_api_words(RequestError("other", None)).param is None


async def test_the_best_of_several_by_mean_logprob(http: httpx.AsyncClient) -> None:
    """Means, not sums: the fourth answer is the longest and still the best."""
    body = (await http.post(TEXT, json={"prompt": "x", "n": 2, "best_of": 4, "seed": 5})).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "3"), (1, "1")]
    assert all(choice["logprobs"] is None for choice in body["choices"])  # measured, not asked for
    made = http.backend.asks  # type: ignore[attr-defined]
    assert [ask.sampling.seed for ask in made] == [5, 6, 7, 8]
    assert all(ask.sampling.logprobs == 0 for ask in made)


async def test_the_best_of_each_prompt(http: httpx.AsyncClient) -> None:
    body = (await http.post(TEXT, json={"prompt": ["x", "y"], "best_of": 2, "logprobs": 1})).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "1"), (1, "3")]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -1.0]


async def test_best_of_n_shows_all_in_order_and_may_stream(http: httpx.AsyncClient) -> None:
    body = (await http.post(TEXT, json={"prompt": "x", "n": 3, "best_of": 3})).json()
    assert [choice["text"] for choice in body["choices"]] == ["0", "1", "2"]
    assert (await http.post(TEXT, json={"prompt": "x", "n": 2, "best_of": 2, "stream": True})).status_code == 200


async def test_echo_says_the_prompt_before_the_answer(http: httpx.AsyncClient) -> None:
    choice = (await http.post(TEXT, json={"prompt": "x", "echo": True, "max_tokens": 3})).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("t0t1t20", None)
    [ask] = http.backend.asks  # type: ignore[attr-defined]
    assert ask.sampling.prompt_logprobs is None


async def test_echo_with_logprobs_tells_of_every_token_of_the_prompt(http: httpx.AsyncClient) -> None:
    """The first has none: nothing comes before it. As the API says, a token is among its own alternatives."""
    choice = (await http.post(TEXT, json={"prompt": "x", "echo": True, "logprobs": 1})).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["t0", "t1", "t2", "0"],
        "token_logprobs": [None, -0.5, -1.0, -3.0],
        "top_logprobs": [None, {"t9": -0.1, "t1": -0.5}, {"t9": -0.1, "t2": -1.0}, {"0": -3.0}],
        "text_offset": [0, 2, 4, 6],
    }
    assert "prompt_logprobs" not in choice
    [ask] = http.backend.asks  # type: ignore[attr-defined]
    assert (ask.sampling.logprobs, ask.sampling.prompt_logprobs) == (1, 1)


async def test_a_prompt_alone_can_be_measured(http: httpx.AsyncClient) -> None:
    """max_tokens=0 with echo, as evaluation harnesses ask it."""
    body = (await http.post(TEXT, json={"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0})).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("t0t1t2", "length")
    assert choice["logprobs"]["tokens"] == ["t0", "t1", "t2"]
    assert body["usage"]["completion_tokens"] == 0
    assert http.backend.asks[0].sampling.max_tokens == 1  # type: ignore[attr-defined]
    refused = await http.post(TEXT, json={"prompt": "x", "max_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


async def test_each_of_several_answers_echoes_and_the_best_is_chosen_by_its_own_tokens(http: httpx.AsyncClient) -> None:
    asked = {"prompt": "x", "echo": True, "logprobs": 0, "n": 2, "best_of": 4}
    choices = (await http.post(TEXT, json=asked)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["t0t1t23", "t0t1t21"]
    assert [choice["logprobs"]["token_logprobs"][:3] for choice in choices] == [[None, -0.5, -1.0]] * 2


async def test_a_stream_echoes_once(http: httpx.AsyncClient) -> None:
    asked = {"prompt": "x", "echo": True, "logprobs": 0, "stream": True}
    lines = (await http.post(TEXT, json=asked)).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "t0t1t20"
    told = [event["choices"][0]["logprobs"]["tokens"] for event in events]
    assert told == [["t0", "t1", "t2", "0"]]


def test_answers_to_one_prompt_are_a_group() -> None:
    made = asks(TextBody, prompt=["a", "b"], n=2)
    groups = [ask.group for ask in made]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert all(groups)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_prompt_logprobs_are_told_with_each_choice_and_computed_once(http: httpx.AsyncClient, path: str) -> None:
    whole = {"messages": [TURN]} if path == CHAT else {"prompt": "x"}
    body = (await http.post(path, json={**whole, "prompt_logprobs": 1, "n": 2})).json()
    for choice in body["choices"]:
        assert choice["prompt_logprobs"] == [
            None,
            {
                "1": {"logprob": -0.5, "rank": 2, "decoded_token": "t1"},
                "9": {"logprob": -0.1, "rank": 1, "decoded_token": "t9"},
            },
            {
                "2": {"logprob": -1.0, "rank": 2, "decoded_token": "t2"},
                "9": {"logprob": -0.1, "rank": 1, "decoded_token": "t9"},
            },
        ]
    assert [ask.sampling.prompt_logprobs for ask in http.backend.asks] == [1, None]  # type: ignore[attr-defined]
    body = (await http.post(path, json=whole)).json()
    assert "prompt_logprobs" not in body["choices"][0]


def test_words_become_ids_where_the_tokenizer_is(tiny_llama: Path) -> None:
    tokenizer = Tokenizer.load(tiny_llama)
    made = put_in_ids(Sampling(bad_ids=((1,),)), Words(9, "<|im_end|>"), tokenizer)
    assert (made.thinking_tokens, made.think_end) == (9, tuple(tokenizer.encode_bare("<|im_end|>")))
    assert made.bad_ids == ((1,),)
    assert put_in_ids(Sampling(), Words(think_end="</think>"), tokenizer) == Sampling()


@pytest.mark.parametrize("word", ["no", [7, 7]])
def test_too_many_words_are_refused(word: object) -> None:
    with pytest.raises(RequestError) as caught:
        asks(bad_words=[word] * 1025)
    assert caught.value.param == "bad_words"
