"""The engine's own part: what it refuses, what it counts, what it forgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.engine import Engine
from cluster.errors import Overloaded, PromptTooLong, RequestError
from cluster.messages import Knobs
from cluster.request import Request, Sampling, Speculation
from tests.fakes import FakeSetup, HashedLaws, fake_engine, ngram, run

SETUP = FakeSetup()
LAWS = HashedLaws(SETUP.vocab_size)
ENDLESS = Sampling(10, temperature=0.0, ignore_eos=True)


def ask(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> Request:
    return Request(name, prompt, replace(ENDLESS, **fields))


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        Sampling(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


@pytest.mark.parametrize("k", [-1, 65])
def test_a_draft_length_out_of_range_is_named(k: int) -> None:
    with pytest.raises(RequestError) as caught:
        Speculation(k=k)
    assert caught.value.param == "speculation.k"


def test_an_empty_prompt_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        Request("r", ())
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token", [-1, 12])
@pytest.mark.parametrize("param", ["prompt", "logit_bias", "stop_ids"])
def test_ids_the_model_does_not_have_are_named(param: str, token: int) -> None:
    if (param, token) == ("logit_bias", -1):
        return  # refused by Sampling already
    request = {
        "prompt": lambda: ask(prompt=(1, token)),
        "logit_bias": lambda: ask(logit_bias={token: 1.0}),
        "stop_ids": lambda: ask(stop_ids=(1, token)),
    }[param]()
    engine = fake_engine(SETUP, LAWS)
    with pytest.raises(RequestError, match="ids are 0 to 11") as caught:
        engine.submit(request)
    assert caught.value.param == param
    assert not engine.has_work


def test_an_unknown_method_is_named_with_those_there_are() -> None:
    engine = fake_engine(SETUP, LAWS, [ngram()])
    with pytest.raises(RequestError, match="configured: ngram") as caught:
        engine.submit(Request("r", (1,), ENDLESS, Speculation(method="oracle")))
    assert caught.value.param == "speculation.method"
    engine.submit(Request("r", (1,), ENDLESS, Speculation(method="ngram")))


def test_the_same_id_twice_is_refused_while_it_runs() -> None:
    engine = fake_engine(SETUP, LAWS)
    engine.submit(ask())
    with pytest.raises(RequestError, match="already running") as caught:
        engine.submit(ask())
    assert caught.value.param == "id"
    finish(engine)
    engine.submit(ask())


@pytest.mark.parametrize(
    ("setup", "longest", "advice"),
    [
        (replace(SETUP, max_context=20), 19, "shorten the prompt to 19 tokens$"),
        (replace(SETUP, num_blocks=4), 15, "to 15 tokens or raise cache.memory$"),
    ],
)
def test_a_prompt_without_room_for_an_answer_is_refused(setup: FakeSetup, longest: int, advice: str) -> None:
    engine = fake_engine(setup, LAWS)
    with pytest.raises(PromptTooLong, match=advice) as caught:
        engine.submit(ask(prompt=(1,) * (longest + 1)))
    assert caught.value.param == "prompt"
    told = run(engine, [ask(prompt=(1,) * longest)])["r"]
    assert (len(told.tokens), told.finish) == (1, "length")


def test_max_tokens_is_cut_to_the_context() -> None:
    told = run(fake_engine(replace(SETUP, max_context=20), LAWS), [ask(prompt=(1,) * 8, max_tokens=500)])["r"]
    assert (len(told.tokens), told.finish) == (12, "length")


def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    engine = fake_engine(replace(SETUP, max_sequences=1, max_waiting=1), LAWS)
    engine.submit(ask("a"))
    engine.submit(ask("b"))
    with pytest.raises(Overloaded):
        engine.submit(ask("c"))
    assert engine.status.waiting == 2
    finish(engine)
    engine.submit(ask("c"))


def test_status_counts_what_is_there() -> None:
    engine = fake_engine(replace(SETUP, max_sequences=1), LAWS)
    assert not engine.has_work
    for name in ("a", "b"):
        engine.submit(ask(name, prompt=(1, 2, 3, 4, 5)))
    assert (engine.status.running, engine.status.waiting, engine.status.blocks_owned) == (0, 2, 0)
    engine.step()
    status = engine.status
    assert (status.running, status.waiting, status.steps, status.blocks_owned) == (1, 1, 1, 2)
    finish(engine)
    status = engine.status
    assert (status.running, status.waiting, status.blocks_owned) == (0, 0, 0)
    assert status.blocks_cached + status.blocks_free == status.blocks_total


def test_a_step_without_work_is_nothing() -> None:
    engine = fake_engine(SETUP, LAWS)
    assert engine.step() == []
    assert engine.status.steps == 0


def test_prefix_hits_are_counted_per_request_and_can_be_forgotten() -> None:
    engine = fake_engine(SETUP, LAWS)
    hits = []
    for name in ("cold", "warm"):
        hits.append(run(engine, [ask(name, prompt=(1,) * 13)])[name].deltas[-1].statistics.cached_tokens)
    engine.forget_prefixes()
    hits.append(run(engine, [ask("forgotten", prompt=(1,) * 13)])["forgotten"].deltas[-1].statistics.cached_tokens)
    salted = replace(ask("salted", prompt=(1,) * 13), salt="tenant")
    hits.append(run(engine, [salted])["salted"].deltas[-1].statistics.cached_tokens)
    assert hits == [0, 12, 0, 0]


def test_knobs_are_in_force_from_the_next_step() -> None:
    engine = fake_engine(replace(SETUP, knobs=Knobs(k=0, adaptive=False)), LAWS, [ngram()])
    engine.submit(ask(prompt=(1, 1, 1, 1)))
    engine.step()
    engine.set_knobs(Knobs(k=2, token_budget=3, adaptive=False))
    assert engine.knobs.k == 2
    engine.step()
    plan = engine._parts.runner.plans[-1]  # type: ignore[attr-defined]
    assert plan.knobs.k == 2
    assert plan.num_tokens <= 3


def test_an_aborted_request_is_heard_of_no_more() -> None:
    engine = fake_engine(SETUP, LAWS)
    engine.submit(ask("a"))
    engine.submit(ask("b"))
    engine.step()
    engine.abort("a")
    engine.abort("nobody")
    assert {delta.request for delta in engine.step()} == {"b"}
