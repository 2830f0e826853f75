"""Law 5: penalties, cuts, biases, logprobs and every kind of ending see one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from cluster.model.history import History
from cluster.request import Request, Sampling
from tests.fakes import FakeSetup, fake_engine, run
from tests.laws.schedules import (
    LAWS,
    PROPOSERS,
    VOCAB,
    alone,
    batches,
    fitting,
    proposer_names,
    proposers,
    rich_samplings,
    setups,
)


def check(setup: FakeSetup, name: str, asked: list[Request]) -> None:
    """Tokens, text, ending and logprobs are those of the plain twins."""
    asked = fitting(setup, asked)
    twins = {request.id: alone(request, text=True) for request in asked}
    told = run(fake_engine(setup, LAWS, proposers(name, setup, asked, twins), text=True), asked)
    for request in asked:
        answer, twin = told[request.id], twins[request.id]
        assert (answer.tokens, answer.finish, answer.text) == (twin.tokens, twin.finish, twin.text)
        assert answer.logprobs == twin.logprobs
        held_to_its_word(request, answer.text)
        raw_logprobs(request, answer.tokens, answer.logprobs)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(setups, proposer_names, batches(rich_samplings, largest=4))
def test_any_sampling_reads_the_same_with_any_proposer(setup: FakeSetup, name: str, asked: list[Request]) -> None:
    check(setup, name, asked)


def held_to_its_word(request: Request, text: str) -> None:
    assert not any(stop in text for stop in request.sampling.stop)


def raw_logprobs(request: Request, tokens: tuple[int, ...], logprobs: tuple) -> None:
    """Of the model itself: before temperature, cuts, penalties and biases."""
    if request.sampling.logprobs is None:
        assert logprobs == ()
        return
    assert len(logprobs) == len(tokens)
    context = list(request.prompt)
    for token, said in zip(tokens, logprobs, strict=True):
        law = torch.log_softmax(LAWS(context).double(), dim=0)
        assert said.token == token
        assert said.rank == 1 + int((law > law[token]).sum())
        assert said.logprob == pytest.approx(float(law[token]), abs=1e-5)
        best = law.sort(descending=True)
        count = min(request.sampling.logprobs, VOCAB)
        assert [alternative for alternative, _ in said.top] == best.indices[:count].tolist()
        assert [value for _, value in said.top] == pytest.approx(best.values[:count].tolist(), abs=1e-5)
        context.append(token)


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_frequency_penalty_counts_tokens_inside_one_draft(name: str) -> None:
    """vllm#18902, #42744, sglang#21258 (R4): each draft position sees its own prefix's counts."""
    flat = lambda context: torch.tensor([0.0, 3.0, 2.0, 1.0, 0.0, 0.0])  # noqa: E731
    request = Request("r", (1, 1, 1, 1), Sampling(20, temperature=0.0, frequency_penalty=2.0, ignore_eos=True))
    setup = FakeSetup(vocab_size=VOCAB)
    twin = alone(request, flat)
    assert twin.tokens[:4] == (1, 2, 1, 3) or len(set(twin.tokens[:4])) > 1
    told = run(fake_engine(setup, flat, proposers(name, setup, [request], {"r": twin})), [request])["r"]
    assert told.tokens == twin.tokens


def test_counting_the_round_as_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of R4 planted: every position of a round gets the counts from before the round."""
    original = History.apply
    monkeypatch.setattr(
        History, "apply", lambda self, rows, paths: [original(self, row, [()]) for row in rows.split(1)]
    )
    flat = lambda context: torch.tensor([0.0, 3.0, 2.0, 1.0, 0.0, 0.0])  # noqa: E731
    request = Request("r", (1, 1, 1, 1), Sampling(20, temperature=0.0, frequency_penalty=2.0, ignore_eos=True))
    twin = alone(request, flat)
    setup = FakeSetup(vocab_size=VOCAB)
    told = run(fake_engine(setup, flat, PROPOSERS["oracle"](setup, {request.prompt: (1,) * 20})), [request])["r"]
    assert told.tokens != twin.tokens


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("kind", ["eos", "stop id", "max_tokens", "stop string"])
def test_an_answer_ends_inside_an_accepted_draft(name: str, kind: str) -> None:
    """Whatever was accepted behind the end is neither emitted nor counted."""
    cycle = lambda context: torch.eye(VOCAB)[(context[-1] + 1) % VOCAB] * 50  # noqa: E731
    sampling = {
        "eos": Sampling(40, temperature=0.0),
        "stop id": Sampling(40, temperature=0.0, ignore_eos=True, stop_ids=(5,)),
        "max_tokens": Sampling(9, temperature=0.0, ignore_eos=True),
        "stop string": Sampling(40, temperature=0.0, ignore_eos=True, stop=("fa",)),
    }[kind]
    request = Request("r", (0, 1, 2, 3, 4, 5, 0, 1, 2), sampling)
    setup = FakeSetup(vocab_size=VOCAB)
    twin = alone(request, cycle, text=True)
    told = run(fake_engine(setup, cycle, proposers(name, setup, [request], {"r": twin}), text=True), [request])["r"]
    assert (told.tokens, told.text, told.finish) == (twin.tokens, twin.text, twin.finish)
    assert told.deltas[-1].statistics.output_tokens == len(twin.tokens)
    assert told.deltas[-1].statistics.accepted <= len(twin.tokens)
    assert told.finish == ("length" if kind == "max_tokens" else "stop")
