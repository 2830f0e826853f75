"""The laws over thousands of random schedules; minutes long, so only `make soak` runs them."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from cluster.errors import Overloaded, PromptTooLong
from cluster.messages import Knobs
from cluster.request import Request, Sampling
from tests.fakes import FakeSetup, fake_engine
from tests.laws.schedules import (
    LAWS,
    PROPOSERS,
    VOCAB,
    Driver,
    alone,
    batches,
    knob_settings,
    plain_samplings,
    proposer_names,
    rich_samplings,
    setups,
)
from tests.laws.test_law1_blocks import AnySchedule
from tests.laws.test_law2_same_tokens import check as same_tokens
from tests.laws.test_law2_same_tokens import starts
from tests.laws.test_law5_one_at_a_time import check as same_reading
from tests.laws.test_law8_preempt_abort import check as untouched
from tests.laws.test_law8_preempt_abort import tight

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

long = settings(max_examples=3000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def test_law1_over_thousands_of_schedules() -> None:
    run_state_machine_as_test(AnySchedule, settings=settings(long, max_examples=1500, stateful_step_count=60))


@long
@given(setups, proposer_names, batches(plain_samplings), starts)
def test_law2_over_thousands_of_batches(setup: FakeSetup, name: str, asked: list[Request], at: list[int]) -> None:
    same_tokens(setup, name, asked, at)


@long
@given(setups, proposer_names, batches(rich_samplings, largest=4))
def test_law5_over_thousands_of_samplings(setup: FakeSetup, name: str, asked: list[Request]) -> None:
    same_reading(setup, name, asked)


@long
@given(
    setup=tight,
    name=proposer_names,
    asked=batches(plain_samplings),
    aborts=st.dictionaries(st.integers(0, 5), st.integers(0, 20), max_size=4),
    turns=st.dictionaries(st.integers(0, 20), knob_settings, max_size=3),
)
def test_law8_over_thousands_of_aborts(
    setup: FakeSetup, name: str, asked: list[Request], aborts: Mapping[int, int], turns: Mapping[int, Knobs]
) -> None:
    untouched(setup, name, asked, aborts, turns)


@pytest.mark.parametrize("name", PROPOSERS)
def test_one_engine_through_thousands_of_requests(name: str) -> None:
    """A long life: answers stay right, the queue refuses and recovers, nothing is kept."""
    dice = random.Random(name)
    setup = FakeSetup(vocab_size=VOCAB, num_blocks=40, max_sequences=6, max_waiting=6, max_context=48, knobs=Knobs(k=4))
    driver = Driver(fake_engine(setup, LAWS, PROPOSERS[name](setup, {})))
    sent: dict[str, Request] = {}
    aborted: set[str] = set()
    for number in range(4000):
        prompt = tuple(dice.randrange(VOCAB) for _ in range(dice.randrange(1, 50)))
        sampling = Sampling(dice.randrange(1, 20), temperature=dice.choice((0.0, 1.0)), seed=dice.randrange(9))
        request = Request(f"r{number}", prompt, sampling, salt=dice.choice(("", "tenant")))
        try:
            driver.submit(request)
            sent[request.id] = request
        except (PromptTooLong, Overloaded):
            pass
        if sent and dice.random() < 0.1:
            victim = dice.choice(list(sent)[-8:])
            aborted.add(victim)
            driver.abort(victim)
        for _ in range(dice.randrange(4)):
            driver.step()
        driver.engine._parts.runner.plans.clear()  # type: ignore[attr-defined]
    driver.finish()
    assert driver.engine.status.blocks_owned == 0
    assert len(sent) > 500
    for request_id in dice.sample(sorted(sent), 300):
        twin, told = alone(sent[request_id]).tokens, driver.tokens(request_id)
        room = setup.max_context - len(sent[request_id].prompt)
        assert told == twin[: len(told)]
        assert request_id in aborted or told == twin[:room]
