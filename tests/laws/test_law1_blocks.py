"""Law 1: free + cached + owned = total after every step, abort and preemption, and nothing is kept in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.draft.model import ModelProposer
from cluster.errors import BrokenInvariant, PromptTooLong
from cluster.messages import Knobs
from cluster.request import Request, RuleName, Sampling, Speculation
from tests.fakes import FakeSetup, draft_proposer, fake_engine, ngram, run
from tests.laws.schedules import (
    LAWS,
    OTHER_LAWS,
    PROPOSERS,
    VOCAB,
    Driver,
    knob_settings,
    plain_samplings,
    prompts,
    proposer_names,
    setups,
    sharing_prompts,
    speculations,
)

LIFE = 1000  # requests


class AnySchedule(RuleBasedStateMachine):
    """Submits, aborts, steps, turned knobs and emptied caches in any order."""

    @initialize(setup=setups, name=proposer_names)
    def build(self, setup: FakeSetup, name: str) -> None:
        self.proposers = PROPOSERS[name](setup, {})
        self.driver = Driver(fake_engine(setup, LAWS, self.proposers))
        self.live: list[str] = []
        self.submitted = 0

    @rule(
        prompt=st.one_of(prompts, sharing_prompts),
        sampling=plain_samplings,
        speculation=speculations,
        salt=st.sampled_from(("", "tenant")),
    )
    def submit(self, prompt: tuple[int, ...], sampling: Sampling, speculation: Speculation, salt: str) -> None:
        name = f"r{self.submitted}"
        self.submitted += 1
        try:
            self.driver.submit(Request(name, prompt, sampling, speculation, salt))
        except PromptTooLong:
            return
        self.live.append(name)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live))
        self.live.remove(name)
        self.driver.abort(name)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            for delta in self.driver.step():
                assert delta.tokens
                if delta.finish is not None:
                    self.live.remove(delta.request)

    @rule(knobs=knob_settings, name=st.sampled_from(("coupled", "ratio")))
    def turn(self, knobs: Knobs, name: RuleName) -> None:
        self.driver.engine.set_knobs(replace(knobs, rule=name))

    @rule()
    def forget_prefixes(self) -> None:
        self.driver.engine.forget_prefixes()
        self.driver.engine.check()

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "driver"):
            return
        status = self.driver.engine.status
        assert status.blocks_free + status.blocks_cached + status.blocks_owned == status.blocks_total
        assert status.running + status.waiting == len(self.live)
        if not self.live:
            assert status.blocks_owned == 0
        for proposer in self.proposers:
            if isinstance(proposer, ModelProposer):
                proposer._cache.check()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.finish()
        assert self.driver.engine.status.blocks_owned == 0
        for proposer in self.proposers:
            if isinstance(proposer, ModelProposer):
                assert proposer._cache.counts.owned == 0
                assert not proposer._states


AnySchedule.TestCase.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestAnySchedule = AnySchedule.TestCase


@pytest.mark.parametrize("block_tokens", [1, 2, 3])
def test_an_arena_that_just_holds_one_request_serves_many(block_tokens: int) -> None:
    """Every request but one is preempted again and again, and all are answered."""
    held = 12 * block_tokens
    setup = FakeSetup(
        vocab_size=VOCAB, block_tokens=block_tokens, num_blocks=12, max_context=held, knobs=Knobs(k=3, adaptive=False)
    )
    asked = [
        Request(f"r{n}", (1 + n % 5,) * (held // 4), Sampling(max_tokens=held, temperature=0.0, ignore_eos=True))
        for n in range(6)
    ]
    engine = fake_engine(setup, LAWS, [ngram(), draft_proposer(setup, OTHER_LAWS)])
    told = run(engine, asked)
    assert all(len(answer.tokens) == held - held // 4 for answer in told.values())
    assert sum(answer.deltas[-1].statistics.preemptions for answer in told.values()) > 0
    assert engine.status.blocks_owned == 0


def test_a_lost_block_is_seen() -> None:
    """The check itself can fail: a leak planted in the table is named."""
    engine = fake_engine(FakeSetup(vocab_size=VOCAB), LAWS)
    engine.submit(Request("r", (1, 2, 3, 4, 5), Sampling(max_tokens=4, ignore_eos=True)))
    engine.step()
    engine.check()
    next(iter(engine._parts.cache._tables.values())).blocks.pop()
    with pytest.raises(BrokenInvariant, match="reference counts"):
        engine.check()


def test_a_long_life_keeps_nothing() -> None:
    """Thousands of requests and aborts leave no table, case, index, state, course or cap behind."""
    setup = FakeSetup(vocab_size=VOCAB, num_blocks=24, max_sequences=4, knobs=Knobs(k=3, token_budget=32))
    drafter = draft_proposer(setup, LAWS, num_blocks=16)
    lookup = ngram()
    engine = fake_engine(setup, LAWS, [lookup, drafter])
    for number in range(LIFE):
        engine.submit(Request(f"r{number}", (number % VOCAB, 1, 2), Sampling(max_tokens=4, seed=number)))
        if number % 3 == 0:
            engine.abort(f"r{number}")
        if number % 2 == 0:
            engine.step()
            engine._parts.runner.plans.clear()
    Driver(engine, {f"r{number}": [] for number in range(LIFE)}).finish()
    engine.submit(Request("last", (1,), Sampling(max_tokens=1)))
    engine.step()
    parts = engine._parts
    held = [engine._sequences, parts.cache._tables, parts.judge._cases, parts.control._courses, lookup._indices]
    held += [drafter._states, drafter._cache._tables]
    assert not any(held)
    assert len(parts.control.knobs.caps) <= 1
    assert len(parts.cache._pool._block_of) <= setup.num_blocks
