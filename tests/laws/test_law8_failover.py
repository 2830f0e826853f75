"""Law 8: an answer whose engine is lost goes on with another, whatever it drafts, to the character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.engine import Engine
from cluster.errors import RequestError
from cluster.messages import Delta, Knobs
from cluster.request import Request, RuleName, Sampling, Speculation
from tests.fakes import Answer, FakeSetup, draft_proposer, fake_engine, run
from tests.laws.asked import PLUGGED, every_samplings
from tests.laws.chi_square import LEAST_P, SPAN, ChainLaws, windows_p_value
from tests.laws.everything import alone, fitting, prompt_logprobs
from tests.laws.schedules import LAWS, OTHER_LAWS, VOCAB, batches, proposer_names, proposers, setups


def engine(setup: FakeSetup, name: str, asked: Sequence[Request], twins: Mapping[str, Answer]) -> Engine:
    return fake_engine(setup, LAWS, proposers(name, setup, asked, twins), text=True, plugged=PLUGGED)


def until_cut(engine: Engine, asked: Sequence[Request], cut: Mapping[str, int]) -> dict[str, list[Delta]]:
    """What was told of each before the engine was lost: at most `cut` deltas, those after it never arrived."""
    told: dict[str, list[Delta]] = {request.id: [] for request in asked}
    for request in asked:
        engine.submit(request)
    for _ in range(max(cut.values())):
        for delta in engine.step():
            if len(told[delta.request]) < cut[delta.request]:
                told[delta.request].append(delta)
    return told


def resumed(request: Request, told: Sequence[Delta], attempt: int) -> Request:
    return replace(request, emitted=tuple(token for delta in told for token in delta.tokens), attempt=attempt)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    setups=st.lists(st.tuples(setups, proposer_names), min_size=2, max_size=3),
    asked=batches(every_samplings(), largest=4),
    cuts=st.lists(st.integers(1, 12), min_size=8, max_size=8),
)
def test_an_answer_goes_on_to_the_character(
    setups: list[tuple[FakeSetup, str]], asked: list[Request], cuts: list[int]
) -> None:
    """Engine after engine is lost; each has its own blocks, draft length, proposers and company."""
    room = min((setup for setup, _ in setups), key=lambda setup: setup.num_blocks * setup.block_tokens)
    asked = fitting(room, asked)  # all engines would cut the answers at the same length
    if not asked:
        return
    twins = {request.id: alone(request) for request in asked}
    told: dict[str, list[Delta]] = {request.id: [] for request in asked}
    for attempt, (setup, name) in enumerate(setups):
        left = [
            resumed(request, told[request.id], attempt)
            for request in asked
            if not told[request.id] or told[request.id][-1].finish is None
        ]
        cut = {request.id: cuts[(attempt + place) % len(cuts)] for place, request in enumerate(left)}
        made = engine(setup, name, asked, twins)
        last = attempt == len(setups) - 1
        if last:
            news = {key: list(answer.deltas) for key, answer in run(made, left).items()}
        elif left:
            news = until_cut(made, left, cut)
        else:
            news = {}
        for key, deltas in news.items():
            told[key].extend(deltas)
    for request in asked:
        answer, twin = Answer(tokens_of(told[request.id]), tuple(told[request.id])), twins[request.id]
        assert (answer.tokens, answer.finish, answer.text) == (twin.tokens, twin.finish, twin.text)
        assert answer.logprobs == twin.logprobs
        assert prompt_logprobs(answer) == prompt_logprobs(twin)
        assert answer.deltas[-1].fault == twin.deltas[-1].fault
        figures = answer.deltas[-1].statistics
        assert (figures.prompt_tokens, figures.output_tokens) == (len(request.prompt), len(twin.tokens))


def tokens_of(deltas: Sequence[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.tokens)


CHAIN = ChainLaws(((0.5, 0.3, 0.1, 0.1), (0.1, 0.2, 0.3, 0.4), (0.25, 0.25, 0.25, 0.25), (0.05, 0.6, 0.05, 0.3)))
GUESS = ChainLaws(((0.3, 0.3, 0.2, 0.2), (0.3, 0.2, 0.3, 0.2), (0.1, 0.2, 0.3, 0.4), (0.3, 0.4, 0.1, 0.2)))


def chain_p_value(rule: RuleName, attempt: int) -> float:
    """Of three tokens, the first from an engine that was lost and the others from one that began anew."""
    setup = FakeSetup(vocab_size=4, num_blocks=600, max_sequences=100, knobs=Knobs(k=2, token_budget=2000))
    sampling = Sampling(SPAN, ignore_eos=True)
    answers: list[tuple[int, Sequence[int]]] = []
    for start in range(0, 2000, 100):
        asked = [
            Request(f"r{n}", (n % 4,), replace(sampling, seed=n), Speculation(rule=rule))
            for n in range(start, start + 100)
        ]
        lost, going = (fake_engine(setup, CHAIN, [draft_proposer(setup, GUESS)]) for _ in range(2))
        told = until_cut(lost, asked, {request.id: 1 for request in asked})
        rest = run(going, [resumed(request, told[request.id], attempt) for request in asked])
        answers.extend((r.prompt[-1], tokens_of(told[r.id]) + rest[r.id].tokens) for r in asked)
    return windows_p_value(answers, CHAIN.chances(1.0))


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_the_law_is_kept_where_draws_are_fresh(rule: RuleName) -> None:
    assert chain_p_value(rule, attempt=1) > LEAST_P


def test_draws_of_a_lost_engine_would_be_drawn_again_without_the_attempt() -> None:
    """The planted fault: rounds of the new engine name the numbers that the old one has read."""
    assert chain_p_value("ratio", attempt=0) < LEAST_P**2


def test_statistics_of_the_parts_add_up() -> None:
    setup = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=3, token_budget=32))
    request = Request("r", (1, 2, 3), Sampling(20, temperature=0.0, ignore_eos=True))
    lost = fake_engine(setup, LAWS, [draft_proposer(setup, OTHER_LAWS)])
    lost.submit(request)
    told = [delta for _ in range(4) for delta in lost.step()]
    going = fake_engine(setup, LAWS, [draft_proposer(setup, LAWS)])
    answer = run(going, [resumed(request, told, 1)])["r"]
    whole = answer.deltas[-1].statistics.after(told[-1].statistics)
    assert whole.output_tokens == 20
    assert whole.rounds == len(told) + len(answer.deltas)
    assert whole.rounds + whole.accepted == 20
    assert sum(whole.accepted_by_position) == whole.accepted
    assert sum(whole.drafted_by_position) == whole.drafted == sum(count.drafted for count in whole.by_source)
    assert whole.cached_tokens == told[-1].statistics.cached_tokens


@pytest.mark.parametrize(
    ("emitted", "sampling"),
    [((1, 2, 3), Sampling(3)), ((1, 0), Sampling(9)), ((1, 99), Sampling(9)), ((1, 2), Sampling(9, stop=("bc",)))],
)
def test_what_cannot_go_on_is_refused(emitted: tuple[int, ...], sampling: Sampling) -> None:
    made = fake_engine(FakeSetup(vocab_size=VOCAB), LAWS, text=True)
    with pytest.raises(RequestError, match="emitted"):
        made.submit(Request("r", (1, 2), sampling, emitted=emitted))
    assert not made.has_work
    made.check()
    assert made.status.waiting == 0


def test_sampling_of_a_resumed_request_starts_at_the_prompt() -> None:
    """Penalties, min_tokens and the seed's position see the whole answer."""
    setup = FakeSetup(vocab_size=VOCAB)
    sampling = Sampling(
        12, temperature=1.0, presence_penalty=2.0, min_tokens=8, logit_bias=MappingProxyType({0: 3.0}), seed=5
    )
    request = Request("r", (1, 2, 3), sampling)
    whole = run(fake_engine(setup, LAWS), [request])["r"].tokens
    for cut in range(len(whole)):
        rest = run(fake_engine(setup, LAWS), [replace(request, emitted=whole[:cut], attempt=1)])["r"].tokens
        assert whole[:cut] + rest == whole
