"""Law 8: preempted, resumed or aborted at any moment: the same tokens, and never a leaked block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.messages import Knobs
from cluster.request import Request, Sampling
from tests.fakes import FakeSetup, fake_engine, run
from tests.laws.schedules import (
    LAWS,
    PROPOSERS,
    VOCAB,
    Driver,
    alone,
    batches,
    fitting,
    knob_settings,
    plain_samplings,
    proposer_names,
    proposers,
    setups,
)

tight = setups.map(lambda setup: replace(setup, num_blocks=4 + setup.num_blocks % 8))


def check(
    setup: FakeSetup, name: str, asked: list[Request], aborts: Mapping[int, int], turns: Mapping[int, Knobs]
) -> None:
    """aborts: step by request number; turns: knobs by step. Whoever stays hears what the plain twin said."""
    asked = fitting(setup, asked)
    twins = {request.id: alone(request) for request in asked}
    driver = Driver(fake_engine(setup, LAWS, proposers(name, setup, asked, twins)))
    for request in asked:
        driver.submit(request)
    for step in range(21):
        for number, at in aborts.items():
            if at == step:
                driver.abort(f"r{number}")
        if step in turns:
            driver.engine.set_knobs(turns[step])
        driver.step()
    driver.finish()
    assert driver.engine.status.blocks_owned == 0
    for request in asked:
        twin = twins[request.id].tokens
        told = driver.tokens(request.id)
        assert told == twin[: len(told)]
        if request.id not in {f"r{number}" for number in aborts}:
            assert told == twin


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    setup=tight,
    name=proposer_names,
    asked=batches(plain_samplings),
    aborts=st.dictionaries(st.integers(0, 5), st.integers(0, 20), max_size=4),
    turns=st.dictionaries(st.integers(0, 20), knob_settings, max_size=3),
)
def test_aborts_and_turned_knobs_touch_nobody_else(
    setup: FakeSetup, name: str, asked: list[Request], aborts: Mapping[int, int], turns: Mapping[int, Knobs]
) -> None:
    check(setup, name, asked, aborts, turns)


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preempted_and_resumed_it_says_the_same(name: str, temperature: float) -> None:
    """vllm#49620, #48245 (A1): a resumed row recomputes known tokens only, never a stale draft or placeholder."""
    setup = FakeSetup(vocab_size=VOCAB, block_tokens=2, num_blocks=16, knobs=Knobs(k=3, token_budget=12))
    asked = [
        Request(f"r{n}", (n, 1, 2, 3), Sampling(26, temperature=temperature, seed=n, ignore_eos=True)) for n in range(5)
    ]
    twins = {request.id: alone(request) for request in asked}
    told = run(fake_engine(setup, LAWS, proposers(name, setup, asked, twins)), asked)
    assert sum(answer.deltas[-1].statistics.preemptions for answer in told.values()) > 0
    assert {key: answer.tokens for key, answer in told.items()} == {key: twin.tokens for key, twin in twins.items()}


@pytest.mark.parametrize("name", PROPOSERS)
def test_abort_returns_blocks_at_once_at_every_moment(name: str) -> None:
    """sglang#36926, #21652 (O4): free count back at the start whenever the caller leaves."""
    setup = FakeSetup(vocab_size=VOCAB, prefix=False, knobs=Knobs(k=3, token_budget=5))
    request = Request("r", (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1), Sampling(12, temperature=0.0, ignore_eos=True))
    for moment in range(12):
        engine = fake_engine(setup, LAWS, PROPOSERS[name](setup, {request.prompt: alone(request).tokens}))
        engine.submit(request)
        for _ in range(moment):
            engine.step()
        engine.abort("r")
        engine.abort("r")
        engine.check()
        assert engine.status.blocks_free == engine.status.blocks_total
        assert not engine.has_work
