"""Law 2: greedy and `coupled` give the tokens of the target alone, whatever drafts and whatever runs beside."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.messages import Knobs
from cluster.request import Request, Sampling
from cluster.verify.rules.base import Facts, Ruling
from tests.fakes import FakeSetup, fake_engine, run
from tests.laws.schedules import (
    LAWS,
    PROPOSERS,
    VOCAB,
    Driver,
    alone,
    batches,
    fitting,
    plain_samplings,
    proposer_names,
    proposers,
    setups,
)
from tests.rulings import plant

thorough = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def check(setup: FakeSetup, name: str, asked: list[Request], starts: list[int]) -> None:
    """Requests arrive at the given steps; each answer is its plain twin's."""
    asked = fitting(setup, asked)
    twins = {request.id: alone(request) for request in asked}
    driver = Driver(fake_engine(setup, LAWS, proposers(name, setup, asked, twins)))
    arrivals = sorted(zip(starts, asked, strict=False), key=lambda arrival: arrival[0])
    for step in range(max(starts) + 1):
        for start, request in arrivals:
            if start == step:
                driver.submit(request)
        driver.step()
    driver.finish()
    for _, request in arrivals:
        assert driver.tokens(request.id) == twins[request.id].tokens
        assert driver.answer(request.id).finish == twins[request.id].finish


starts = st.lists(st.integers(0, 12), min_size=6, max_size=6)


@thorough
@given(setups, proposer_names, batches(plain_samplings), starts)
def test_any_proposer_in_any_batch_gives_the_tokens_of_none(
    setup: FakeSetup, name: str, asked: list[Request], starts: list[int]
) -> None:
    check(setup, name, asked, starts)


@settings(thorough, max_examples=20)
@given(setups, proposer_names, batches(plain_samplings.map(lambda s: replace(s, temperature=0.0))), starts)
def test_greedy_is_the_same_under_ratio(setup: FakeSetup, name: str, asked: list[Request], starts: list[int]) -> None:
    check(replace(setup, knobs=replace(setup.knobs, rule="ratio")), name, asked, starts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("k", [1, 7])
def test_every_proposer_and_length(name: str, k: int, temperature: float) -> None:
    setup = FakeSetup(vocab_size=VOCAB, num_blocks=60, knobs=Knobs(k=k, token_budget=64, adaptive=False))
    asked = [
        Request(f"r{n}", tuple((n + i) % VOCAB for i in range(n + 1)), Sampling(24, temperature=temperature, seed=n))
        for n in range(6)
    ]
    check(setup, name, asked, [0, 0, 1, 3, 5, 5])


def test_order_of_arrival_and_repetition_change_nothing() -> None:
    setup = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=3, token_budget=9))
    asked = [Request(f"r{n}", (1, 2, n), Sampling(20, seed=7)) for n in range(5)]
    first = run(fake_engine(setup, LAWS, PROPOSERS["first of several"](setup, {})), asked)
    engine = fake_engine(setup, LAWS, PROPOSERS["first of several"](setup, {}))
    for order in (asked, asked[::-1], asked[2:] + asked[:2]):
        again = run(engine, order)
        assert {name: answer.tokens for name, answer in again.items()} == {
            name: answer.tokens for name, answer in first.items()
        }


@pytest.mark.parametrize("name", ["ngram", "liar", "model, other law"])
def test_a_draft_kept_unverified_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lattice#243 (R6): were the first draft committed whatever the target says, this law would break."""

    def trusting(facts: Facts) -> Ruling:
        return Ruling(1, (facts.drafts[0], facts.own[1])) if facts.drafts else Ruling(0, (facts.own[0],))

    request = Request("r", (1, 2, 1, 2), Sampling(24, temperature=0.0, ignore_eos=True))
    setup = FakeSetup(vocab_size=VOCAB)
    twin = alone(request)
    plant(monkeypatch, "coupled", trusting)
    told = run(fake_engine(setup, LAWS, PROPOSERS[name](setup, {})), [request])["r"]
    assert told.tokens != twin.tokens
