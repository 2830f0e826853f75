"""Bodies are read as the API means them, and refused by the name of what is wrong."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import RequestError
from cluster.messages import SourceCount, Statistics
from cluster.request import Sampling, Speculation
from deploy.openai.schema import ChatBody, SpeculationOptions, TextBody, read
from deploy.openai.stream import usage
from deploy.results import Usage

TURN = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatBody:
    return read(ChatBody, {"messages": [TURN], **fields})


def text(**fields: Any) -> TextBody:
    return read(TextBody, {"prompt": "hi", **fields})


def test_every_field_reaches_sampling() -> None:
    [ask] = chat(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.5, presence_penalty=0.25,
        frequency_penalty=-0.25, logit_bias={"5": 1.5}, seed=3, stop=["a", "b"], ignore_eos=True, logprobs=True,
        top_logprobs=2, stream=True,
    ).asks(100)  # fmt: skip
    assert ask.sampling == Sampling(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.5, presence_penalty=0.25,
        frequency_penalty=-0.25, logit_bias={5: 1.5}, seed=3, stop=("a", "b"), ignore_eos=True, logprobs=2,
    )  # fmt: skip
    assert ask.stream
    assert ask.prompt == (TURN,)


def test_what_is_not_said_is_the_default() -> None:
    [ask] = text().asks(33)
    assert ask.sampling == Sampling(max_tokens=33, seed=ask.sampling.seed)
    assert ask.speculation == Speculation()
    assert not ask.stream


def test_nulls_count_as_not_said() -> None:
    [ask] = chat(temperature=None, stop=None, n=None, tools=None, response_format=None, seed=4).asks(5)
    assert ask.sampling == Sampling(max_tokens=5, seed=4)


def test_seeds_differ_unless_given() -> None:
    assert text().asks(1)[0].sampling.seed != text().asks(1)[0].sampling.seed
    assert [ask.sampling.seed for ask in text(n=3, seed=5).asks(1)] == [5, 6, 7]
    assert len({ask.sampling.seed for ask in text(prompt=["a", "b"]).asks(1)}) == 2


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ("", [""]),
    ],
)
def test_prompts_of_every_shape(prompt: Any, asked: list[Any]) -> None:
    assert [ask.prompt for ask in text(prompt=prompt).asks(1)] == asked


def test_content_may_be_parts_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = read(ChatBody, {"messages": [{"role": "developer", "content": parts}, {"role": "user", "content": "c"}]})
    assert body.asks(1)[0].prompt == ({"role": "system", "content": "ab"}, {"role": "user", "content": "c"})


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).asks(1)[0].sampling.max_tokens == 7


def test_speculation_is_handed_on() -> None:
    [ask] = chat(speculation={"enabled": False, "k": 3, "rule": "ratio", "method": "ngram"}).asks(1)
    assert ask.speculation == Speculation(False, 3, "ratio", "ngram")


def test_what_cannot_change_the_answer_is_ignored() -> None:
    chat(user="me", metadata={"a": "b"}, store=True, tools=[], tool_choice="none", response_format={"type": "text"})
    text(echo=False, best_of=1, suffix=None)


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatBody, {"tools": [{"type": "function"}]}, "tools"),
        (ChatBody, {"response_format": {"type": "json_object"}}, "response_format"),
        (ChatBody, {"echo": True}, "echo"),
        (TextBody, {"n": 3, "best_of": 2}, "best_of"),
        (TextBody, {"suffix": "x"}, "suffix"),
        (ChatBody, {"temperature": "hot"}, "temperature"),
        (ChatBody, {"temperature": -1}, "temperature"),
        (ChatBody, {"temperature": float("nan")}, "temperature"),
        (ChatBody, {"top_p": 0}, "top_p"),
        (ChatBody, {"max_tokens": 0}, "max_tokens"),
        (ChatBody, {"max_tokens": 1.5}, "max_tokens"),
        (ChatBody, {"n": 9}, "n"),
        (ChatBody, {"n": 0}, "n"),
        (ChatBody, {"stream": "yes"}, "stream"),
        (ChatBody, {"stop": ["a", 1]}, "stop[1]"),
        (ChatBody, {"stop": ""}, "stop"),
        (ChatBody, {"stop": [str(i) for i in range(17)]}, "stop"),
        (ChatBody, {"seed": -1}, "seed"),
        (ChatBody, {"seed": 2**63}, "seed"),
        (ChatBody, {"logit_bias": {"x": 1}}, "logit_bias"),
        (ChatBody, {"logit_bias": {"1": 1000}}, "logit_bias"),
        (ChatBody, {"top_logprobs": 2}, "top_logprobs"),
        (ChatBody, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (ChatBody, {"messages": []}, "messages"),
        (ChatBody, {"messages": None}, "messages"),
        (ChatBody, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (ChatBody, {"messages": [TURN, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (ChatBody, {"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        (ChatBody, {"speculation": {"K": 3}}, "speculation.K"),
        (ChatBody, {"speculation": {"k": 65}}, "speculation.k"),
        (ChatBody, {"speculation": {"rule": "hope"}}, "speculation.rule"),
        (TextBody, {"prompt": 3}, "prompt"),
        (TextBody, {"prompt": []}, "prompt"),
        (TextBody, {"prompt": ["a", 1]}, "prompt"),
        (TextBody, {"prompt": [1, -1]}, "prompt[1]"),
        (TextBody, {"prompt": ["a"] * 5, "n": 8}, "n"),
        (TextBody, {"logprobs": 21}, "logprobs"),
    ],
)
def test_refusals_name_the_field(kind: type, fields: dict[str, Any], param: str) -> None:
    whole = {"messages": [TURN]} if kind is ChatBody else {"prompt": "hi"}
    with pytest.raises(RequestError) as refusal:
        read(kind, {**whole, **fields}).asks(10)
    assert (refusal.value.param or "").startswith(param)
    assert len(str(refusal.value)) < 300


def test_a_misspelt_field_gets_a_hint() -> None:
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        chat(temprature=1)


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(RequestError, match="object"):
        read(ChatBody, body)


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(RequestError, match="missing") as refusal:
        read(TextBody, {})
    assert refusal.value.param == "prompt"


def test_the_page_of_the_api_has_every_field_and_every_figure() -> None:
    page = (Path(__file__).parents[2] / "docs/api.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    fields = {name for kind in (ChatBody, TextBody, SpeculationOptions) for name in kind.model_fields}
    assert fields - named == {"messages", "prompt"}
    figures = usage([Statistics()], 1)
    assert figures["outrider"].keys() - named == set()
    assert set(re.findall(r"^\| `(\w+)`(?:, `(\w+)`)?.* \|$", page.partition("## Usage")[2], re.MULTILINE)) == {
        ("rounds", ""), ("drafted", "accepted"), ("drafted_by_position", "accepted_by_position"), ("by_source", ""),
        ("preemptions", ""), ("failovers", ""), ("rule", "lossy"),
    }  # fmt: skip


def test_a_client_reads_every_figure() -> None:
    figures = usage(
        [Statistics(5, 1, 9, 4, 8, 5, (3, 2), (4, 4), 1, (SourceCount("ngram", 8, 5),), "typical", True, 2)], 1
    )
    read_back = dataclasses.asdict(Usage.read(figures))
    ours = {name: tuple(value) if isinstance(value, list) else value for name, value in figures["outrider"].items()}
    assert {name: read_back[name] for name in ours} == ours
