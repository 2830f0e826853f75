"""Law 5 over everything a request may ask for, all at once, with any proposer: as if alone and one token at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.engine import Engine
from cluster.messages import Knobs
from cluster.model.processors import LogitsProcessor
from cluster.request import Request, Sampling
from tests.fakes import Answer, FakeSetup, fake_engine, run
from tests.laws.schedules import (
    CONTEXT,
    LAWS,
    PROPOSERS,
    VOCAB,
    batches,
    proposer_names,
    proposers,
    rich_samplings,
    setups,
    tokens,
)


def tilted(seen: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
    """Depends on every token before the position."""
    return logits_V + torch.tensor([float(sum(seen) * (token + 3) % 7) for token in range(len(logits_V))])


def unrepeated(seen: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
    logits_V[seen[-1]] = float("-inf")
    return logits_V


def broken(seen: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
    if seen[-1] == 3:
        raise ZeroDivisionError("three")
    return logits_V * float("nan") if sum(seen) % 11 == 0 else logits_V


PLUGGED: Mapping[str, LogitsProcessor] = {"tilted": tilted, "unrepeated": unrepeated, "broken": broken}

words = st.text("abcdef", min_size=1, max_size=4)
sequences = st.lists(tokens, min_size=1, max_size=3).map(tuple)


@st.composite
def every_samplings(draw: st.DrawFn) -> Sampling:
    """`rich_samplings` and everything beside; about half of each is switched off."""
    base = draw(rich_samplings)
    budget = draw(st.one_of(st.none(), st.integers(0, 12)))
    return replace(
        base,
        min_tokens=draw(st.one_of(st.just(0), st.integers(0, base.max_tokens))),
        include_stop=draw(st.booleans()),
        allowed_ids=draw(st.one_of(st.none(), st.lists(tokens, min_size=1, max_size=5).map(tuple))),
        bad_ids=draw(st.one_of(st.just(()), st.lists(sequences, max_size=4).map(tuple))),
        bad_words=draw(
            st.one_of(st.just(()), st.lists(st.text("abcdef", min_size=1, max_size=4), max_size=3).map(tuple))
        ),
        thinking_tokens=budget,
        think_end=() if budget is None else draw(sequences),
        prompt_logprobs=draw(st.sampled_from((None, None, 0, 2))),
        logits_processors=tuple(draw(st.lists(st.sampled_from(sorted(PLUGGED)), unique=True, max_size=1))),
    )


def engine(setup: FakeSetup, name: str, asked: Sequence[Request], twins: Mapping[str, Answer]) -> Engine:
    return fake_engine(setup, LAWS, proposers(name, setup, asked, twins), text=True, plugged=PLUGGED)


def alone(request: Request) -> Answer:
    """Alone in a roomy engine that never drafts, shares or preempts."""
    roomy = FakeSetup(VOCAB, num_blocks=64, prefix=False, max_context=CONTEXT + 64, knobs=Knobs(k=0, adaptive=False))
    return run(fake_engine(roomy, LAWS, text=True, plugged=PLUGGED), [request])[request.id]


def fitting(setup: FakeSetup, batch: Sequence[Request]) -> list[Request]:
    held = min(setup.max_context, setup.num_blocks * setup.block_tokens)
    cut = []
    for request in batch:
        room = min(held - len(request.prompt), request.sampling.max_tokens)
        if room >= 1:
            least = min(room, request.sampling.min_tokens)
            cut.append(replace(request, sampling=replace(request.sampling, max_tokens=room, min_tokens=least)))
    return cut


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(setups, proposer_names, batches(every_samplings(), largest=4))
def test_all_parameters_at_once_with_any_proposer(setup: FakeSetup, name: str, asked: list[Request]) -> None:
    asked = fitting(setup, asked)
    twins = {request.id: alone(request) for request in asked}
    told = run(engine(setup, name, asked, twins), asked)
    for request in asked:
        answer, twin = told[request.id], twins[request.id]
        assert (answer.tokens, answer.finish, answer.text) == (twin.tokens, twin.finish, twin.text)
        assert answer.logprobs == twin.logprobs
        assert answer.deltas[-1].fault == twin.deltas[-1].fault
        assert prompt_logprobs(answer) == prompt_logprobs(twin)
        keeps_its_word(request, answer)


def prompt_logprobs(answer: Answer) -> list:
    return [entry for delta in answer.deltas for entry in delta.prompt_logprobs]


def keeps_its_word(request: Request, answer: Answer) -> None:
    """Checked against the words of the parameters, apart from how they are put into effect."""
    sampling, said = request.sampling, answer.tokens
    end = sampling.think_end
    forced = range(0)
    if sampling.thinking_tokens is not None and not completes(said[: sampling.thinking_tokens], end):
        forced = range(sampling.thinking_tokens, sampling.thinking_tokens + len(end))
        expected = end[: max(0, len(said) - sampling.thinking_tokens)]
        assert said[forced.start : forced.start + len(expected)] == expected
    free = [token for place, token in enumerate(said) if place not in forced]
    if sampling.allowed_ids is not None:
        assert set(free) <= set(sampling.allowed_ids)
    for bad in sampling.bad_ids:
        ends = [at + len(bad) - 1 for at in range(len(said)) if said[at : at + len(bad)] == bad]
        assert all(place in forced for place in ends)
    letters = bytes(token + ord("a") for token in said).decode()
    for word in sampling.bad_words:
        ends = [at + len(word) - 1 for at in range(len(said)) if letters.startswith(word, at)]
        assert all(place in forced for place in ends)
    if answer.finish == "stop":
        assert len(said) > sampling.min_tokens
    if (asked := sampling.prompt_logprobs) is not None and said:
        entries = prompt_logprobs(answer)
        assert [entry.token for entry in entries] == list(request.prompt[1:])
        for length, entry in enumerate(entries, start=1):
            law = torch.log_softmax(LAWS(request.prompt[:length]).double(), dim=0)
            assert entry.logprob == pytest.approx(float(law[entry.token]), abs=1e-5)
            assert [token for token, _ in entry.top] == law.sort(descending=True).indices[:asked].tolist()
    if answer.finish == "error":
        assert answer.deltas[-1].fault is not None


def completes(said: Sequence[int], mark: Sequence[int]) -> bool:
    return any(tuple(said[at : at + len(mark)]) == tuple(mark) for at in range(len(said)))


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
