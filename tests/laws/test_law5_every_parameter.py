"""Law 5 over everything a request may ask for, all at once, with any proposer: as if alone and one token at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from cluster.engine import Engine
from cluster.messages import Knobs
from cluster.request import Request, Sampling
from tests.fakes import Answer, FakeSetup, fake_engine, run
from tests.laws.asked import PLUGGED
from tests.laws.everything import alone, completes
from tests.laws.schedules import (
    LAWS,
    PROPOSERS,
    VOCAB,
    proposers,
)


def engine(setup: FakeSetup, name: str, asked: Sequence[Request], twins: Mapping[str, Answer]) -> Engine:
    return fake_engine(setup, LAWS, proposers(name, setup, asked, twins), text=True, plugged=PLUGGED)


CYCLE = lambda context: torch.eye(VOCAB)[(context[-1] + 1) % VOCAB] * 50  # noqa: E731
ENDLESS = Sampling(40, temperature=0.0, ignore_eos=True)
LOOP = (0, 1, 2, 3, 4, 5, 0, 1, 2)


def cycled(name: str, sampling: Sampling, k: int = 4) -> tuple[Answer, Answer]:
    """With the proposer, and without any: a target that counts, so that most drafts stand."""
    request = Request("r", LOOP, sampling)
    setup = FakeSetup(VOCAB, knobs=Knobs(k=k, token_budget=32, adaptive=False))
    twin = run(fake_engine(replace(setup, knobs=Knobs(k=0)), CYCLE, text=True, plugged=PLUGGED), [request])["r"]
    made = proposers(name, setup, [request], {"r": twin})
    return run(fake_engine(setup, CYCLE, made, text=True, plugged=PLUGGED), [request])["r"], twin


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("budget", [0, 1, 19, 20, 21, 22, 23])
def test_a_thinking_budget_cuts_exactly_inside_an_accepted_batch(name: str, budget: int) -> None:
    """vllm#39573, #54906, #44510 (G5): with k=4 the budget ends at every place of a batch of accepted drafts."""
    told, twin = cycled(name, replace(ENDLESS, thinking_tokens=budget, think_end=(5, 5, 0)))
    assert told.tokens == twin.tokens
    assert told.tokens[budget : budget + 3] == (5, 5, 0)
    assert not completes(told.tokens[:budget], (5, 5, 0))
    assert told.tokens[:budget] == tuple((3 + n) % VOCAB for n in range(budget))
    assert told.tokens[budget + 3] == 1
    if name == "oracle":
        assert told.deltas[-1].statistics.accepted >= 24


def test_a_mark_within_the_budget_ends_thinking() -> None:
    told, _ = cycled("oracle", replace(ENDLESS, thinking_tokens=6, think_end=(4, 5)))
    assert told.tokens == tuple((3 + n) % VOCAB for n in range(40))


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize(
    ("sampling", "tokens_said", "text", "finish"),
    [
        (Sampling(9, temperature=0.0, min_tokens=4), (3, 4, 5, 1, 2, 3, 4, 5, 0), None, "stop"),
        (Sampling(9, temperature=0.0, ignore_eos=True, stop=("f",), min_tokens=3), None, "defabcde", "stop"),
        (Sampling(9, temperature=0.0, ignore_eos=True, stop=("fa",), include_stop=True), None, "defa", "stop"),
        (Sampling(9, temperature=0.0, ignore_eos=True, stop_ids=(5,), include_stop=True), None, "def", "stop"),
        (Sampling(9, temperature=0.0, ignore_eos=True, stop_ids=(5,)), None, "de", "stop"),
        (Sampling(6, temperature=0.0, ignore_eos=True, allowed_ids=(1, 2, 3)), (3, 1, 2, 3, 1, 2), None, "length"),
        (Sampling(6, temperature=0.0, ignore_eos=True, bad_ids=((4,), (0, 1))), (3, 0, 0, 0, 0, 0), None, "length"),
    ],
)
def test_what_the_words_say(
    name: str, sampling: Sampling, tokens_said: tuple[int, ...] | None, text: str | None, finish: str
) -> None:
    told, twin = cycled(name, sampling)
    assert (told.tokens, told.text, told.finish) == (twin.tokens, twin.text, twin.finish)
    assert told.finish == finish
    assert tokens_said in (None, told.tokens)
    assert text in (None, told.text)


@pytest.mark.parametrize("name", PROPOSERS)
def test_min_p_shapes_every_position_of_a_round(name: str) -> None:
    """vllm#18902 (R4): min_p refused or on the bonus token alone. Here min_p=1 leaves the likeliest token only."""
    request = Request("r", LOOP, Sampling(30, temperature=2.0, min_p=1.0, seed=7, ignore_eos=True))
    greedy = alone(replace(request, sampling=replace(request.sampling, temperature=0.0, min_p=0.0)))
    setup = FakeSetup(VOCAB)
    told = run(engine(setup, name, [request], {"r": greedy}), [request])["r"]
    assert told.tokens == greedy.tokens


@pytest.mark.parametrize("name", ["none", "oracle", "liar"])
@pytest.mark.parametrize(
    ("sampling", "message", "param"),
    [
        (
            replace(ENDLESS, logits_processors=("broken",)),
            "'broken' raised ZeroDivisionError: three",
            "logits_processors",
        ),
        (replace(ENDLESS, allowed_ids=(4,), bad_ids=((4, 4),)), "no token is possible", None),
        (replace(ENDLESS, allowed_ids=(4,), stop_ids=(4,), min_tokens=2), "no token is possible", None),
    ],
)
def test_a_request_without_a_next_token_ends_alone(name: str, sampling: Sampling, message: str, param: str) -> None:
    """Its neighbour in the batch is not touched, and nothing is left behind."""
    bad, good = Request("bad", LOOP, sampling), Request("good", LOOP, ENDLESS)
    setup = FakeSetup(VOCAB)
    twins = {"good": run(fake_engine(setup, CYCLE), [good])["good"]}
    made = fake_engine(setup, CYCLE, proposers(name, setup, [good], twins), plugged=PLUGGED)
    told = run(made, [bad, good])
    assert told["good"].tokens == twins["good"].tokens
    last = told["bad"].deltas[-1]
    assert last.finish == "error"
    assert last.fault is not None
    assert message in last.fault.message
    assert last.fault.param == param
    assert made.status.blocks_owned == 0


def test_a_fault_behind_a_rejected_draft_is_nobodys() -> None:
    """Only positions that are reached count: the liar proposes 3 all along, after which `broken` breaks."""
    law = lambda context: torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0, 0.0])  # noqa: E731
    request = Request("r", (1, 1), replace(ENDLESS, max_tokens=12, logits_processors=("broken",)))
    setup = FakeSetup(VOCAB)
    made = PROPOSERS["oracle"](setup, {request.prompt: (3,) * 12})
    told = run(
        fake_engine(setup, law, made, plugged={"broken": lambda seen, logits: 1 // (seen[-1] != 3) * logits}), [request]
    )["r"]
    assert told.tokens == (1,) * 12
    assert told.deltas[-1].statistics.drafted > 0


def test_sharing_nothing_a_prompt_is_told_whole() -> None:
    """The prompt's blocks are cached already; its log-probabilities come from computing all of it again."""
    setup = FakeSetup(VOCAB, knobs=Knobs(k=2, token_budget=5, adaptive=False))
    made = fake_engine(setup, LAWS)
    prompt = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2)
    run(made, [Request("warm", prompt, replace(ENDLESS, max_tokens=3))])
    told = run(made, [Request("told", prompt, replace(ENDLESS, max_tokens=3, prompt_logprobs=0))])["told"]
    assert [entry.token for entry in told.deltas[0].prompt_logprobs] == list(prompt[1:])
    assert told.deltas[-1].statistics.cached_tokens == 0
    assert all(not delta.prompt_logprobs for delta in told.deltas[1:])
