"""Who starts next, who gives way, and whose prompt is computed once for several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.engine import Engine
from cluster.errors import RequestError
from cluster.messages import Delta, Knobs
from cluster.request import Request, Sampling
from cluster.sched.policy import ByPriority, Fair, Fcfs, Policy
from cluster.sched.sequence import Sequence as Live
from tests.fakes import FakeSetup, HashedLaws, fake_engine, ngram, run

LAWS = HashedLaws(12)
#: One at a time, so that the order of starts is the order of endings.
SINGLE = FakeSetup(max_sequences=1, prefix=False, knobs=Knobs(k=0, token_budget=32, adaptive=False))
ENDLESS = Sampling(4, temperature=0.0, ignore_eos=True)


def ask(name: str, sampling: Sampling = ENDLESS, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> Request:
    return Request(name, tuple(prompt), sampling, **fields)


def order(policy: Policy, requests: Sequence[Request], setup: FakeSetup = SINGLE) -> list[str]:
    """Names in the order in which they ended."""
    engine = fake_engine(setup, LAWS, policy=policy)
    for request in requests:
        engine.submit(request)
    return [delta.request for delta in drained(engine) if delta.finish]


def drained(engine: Engine) -> list[Delta]:
    deltas = []
    while engine.has_work:
        deltas.extend(engine.step())
        engine.check()
    return deltas


def test_first_come_first_served_whoever_asks() -> None:
    asked = [ask(name, key=name[0]) for name in ("a1", "a2", "b1")]
    assert order(Fcfs(), asked) == ["a1", "a2", "b1"]


def test_lower_priority_numbers_start_first_and_equals_in_order() -> None:
    priorities = {"late": 5, "plain": 0, "urgent": -1, "plain too": 0}
    asked = [ask(name, priority=priority) for name, priority in priorities.items()]
    assert order(ByPriority(), asked) == ["urgent", "plain", "plain too", "late"]


def test_a_priority_that_nobody_looks_at_is_refused() -> None:
    engine = fake_engine(SINGLE, LAWS)
    with pytest.raises(RequestError, match=r"scheduler.policy is fcfs") as caught:
        engine.submit(ask("r", priority=1))
    assert caught.value.param == "priority"
    assert not engine.has_work
    assert engine.status.waiting == 0


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1])
def test_a_priority_out_of_range_is_named(priority: int) -> None:
    with pytest.raises(RequestError) as caught:
        ask("r", priority=priority)
    assert caught.value.param == "priority"


@pytest.mark.parametrize(("policy", "victim"), [(Fcfs, "second"), (ByPriority, "first")])
def test_the_least_important_gives_way_when_blocks_run_short(policy: type[Policy], victim: str) -> None:
    setup = FakeSetup(block_tokens=2, num_blocks=8, prefix=False, knobs=Knobs(k=0, token_budget=32, adaptive=False))
    priorities = {"first": 1, "second": 0} if policy is ByPriority else {"first": 0, "second": 0}
    asked = [ask(name, Sampling(10, temperature=0.0, ignore_eos=True), priority=p) for name, p in priorities.items()]
    told = run(fake_engine(setup, LAWS, policy=policy()), asked)
    preempted = {name for name, answer in told.items() if answer.deltas[-1].statistics.preemptions}
    assert preempted == {victim}
    plain = {request.id: run(fake_engine(FakeSetup(), LAWS), [replace(request, priority=0)]) for request in asked}
    assert {name: answer.tokens for name, answer in told.items()} == {n: plain[n][n].tokens for n in plain}


def preempted(told: Sequence[Delta]) -> set[str]:
    return {delta.request for delta in told if delta.statistics.preemptions}


@pytest.mark.parametrize(("policy", "sent_back"), [(Fair(Fcfs()), set()), (ByPriority(), {"b"})])
def test_an_urgent_request_takes_the_place_of_the_least_important_that_runs(policy: Policy, sent_back: set) -> None:
    """Two run, and all are told their own answer in the end; of two alike the newer gives way, none for an equal."""
    setup = replace(SINGLE, max_sequences=2)
    looks = order_looks_at_priority(policy)
    long = Sampling(12, temperature=1.0, seed=3, ignore_eos=True)
    engine = fake_engine(setup, LAWS, policy=policy)
    told: list[Delta] = []
    for name, priority in {"a": 1, "b": 1, "c": 1, "urgent": 0, "d": 1}.items():
        engine.submit(ask(name, long, priority=priority if looks else 0))
        told += [delta for _ in range(2) for delta in engine.step()]
    assert ("urgent" in {delta.request for delta in told}) is looks
    told += drained(engine)
    assert preempted(told) == sent_back
    ended = [delta.request for delta in told if delta.finish]
    assert ended == (["a", "urgent", "b", "c", "d"] if looks else ["a", "b", "c", "urgent", "d"])
    for name in ended:
        tokens = [token for delta in told if delta.request == name for token in delta.tokens]
        assert tuple(tokens) == run(fake_engine(setup, LAWS), [ask(name, long)])[name].tokens


def test_an_urgent_request_takes_blocks_from_as_few_as_it_needs() -> None:
    setup = FakeSetup(block_tokens=2, num_blocks=12, prefix=False, knobs=Knobs(k=0, token_budget=32, adaptive=False))
    engine = fake_engine(setup, LAWS, policy=ByPriority())
    for name, priority in {"first": 1, "second": 3, "third": 2}.items():
        engine.submit(ask(name, Sampling(4, ignore_eos=True), prompt=(1, 2, 3, 4), priority=priority))
    engine.step()
    assert engine.status.running == 3  # of 2 or 3 blocks each
    engine.submit(ask("urgent", prompt=(1, 2, 3, 4, 5, 6), priority=0))
    told = drained(engine)
    assert preempted(told) == {"second"}


def test_nobody_leaves_for_one_that_could_not_start_even_so() -> None:
    """What it lacks is held by its equals: the unimportant keep their place."""
    setup = FakeSetup(block_tokens=2, num_blocks=12, prefix=False, knobs=Knobs(k=0, token_budget=32, adaptive=False))
    engine = fake_engine(setup, LAWS, policy=ByPriority())
    engine.submit(ask("equal", Sampling(4, ignore_eos=True), prompt=(1,) * 12, priority=0))
    engine.submit(ask("small", Sampling(2, ignore_eos=True), prompt=(1, 2), priority=1))
    engine.step()
    engine.submit(ask("large", Sampling(4, ignore_eos=True), prompt=(2,) * 14, priority=0))
    told = [delta for _ in range(1) for delta in engine.step()]
    assert "small" in {delta.request for delta in told if delta.finish == "length"}
    assert preempted(told + drained(engine)) == set()


def test_an_urgent_request_goes_before_a_long_prompt_under_way() -> None:
    """The budget of a step goes to the more important prompt first, though another is half computed."""
    setup = FakeSetup(num_blocks=100, knobs=Knobs(k=0, token_budget=8, adaptive=False))
    engine = fake_engine(setup, LAWS, policy=ByPriority())
    engine.submit(ask("long", prompt=(1,) * 60, priority=1))
    engine.step()
    engine.submit(ask("urgent", prompt=(2,) * 8))
    assert [delta.request for delta in engine.step()] == ["urgent"]
    assert preempted(drained(engine)) == set()


def test_a_greedy_key_waits_for_the_others() -> None:
    """Ten requests of one caller and then two of another: the second caller does not wait for all ten."""
    asked = [ask(f"greedy{n}", key="greedy") for n in range(10)] + [ask(f"modest{n}", key="modest") for n in range(2)]
    assert order(Fcfs(), asked).index("modest1") == 11
    ended = order(Fair(Fcfs()), asked)
    assert ended[:4] == ["greedy0", "modest0", "greedy1", "modest1"]
    assert [name for name in ended if "greedy" in name] == [f"greedy{n}" for n in range(10)]


def test_fairness_counts_tokens_not_requests() -> None:
    long = Sampling(24, temperature=0.0, ignore_eos=True)
    asked = [ask(f"long{n}", long, key="long") for n in range(3)] + [ask(f"short{n}", key="short") for n in range(6)]
    ended = order(Fair(Fcfs()), asked)
    assert ended.index("long1") >= 4  # several short ones weigh as much as one long


def test_without_a_key_the_salt_says_whose_it_is() -> None:
    asked = [ask(f"a{n}", salt="a") for n in range(3)] + [ask("b", salt="b")]
    assert order(Fair(Fcfs()), asked)[:2] == ["a0", "b"]


def test_importance_goes_before_fairness() -> None:
    asked = [ask("a0", key="a"), ask("a1", key="a", priority=-1), ask("b", key="b"), ask("a2", key="a", priority=-1)]
    assert order(Fair(ByPriority()), asked) == ["a1", "a2", "b", "a0"]


def live(number: int, key: str) -> Live:
    return Live(number, ask(str(number), key=key), [1, 2, 3])


def test_having_been_away_earns_no_credit() -> None:
    policy = Fair(Fcfs())
    busy, away = live(0, "busy"), live(1, "away")
    policy.arrived(busy)
    policy.arrived(away)
    policy.left(away)
    policy.served(busy, 1000)
    back = live(2, "away")
    policy.arrived(back)
    assert policy.turn(back) == (1000, 2)


def test_a_short_pause_forgives_nothing() -> None:
    policy = Fair(Fcfs())
    other, hungry = live(0, "other"), live(1, "hungry")
    policy.arrived(other)
    policy.arrived(hungry)
    policy.served(hungry, 500)
    policy.left(hungry)
    back = live(2, "hungry")
    policy.arrived(back)
    assert policy.turn(back) == (500, 2)
    assert policy.turn(other) == (0, 0)


def test_keys_are_forgotten_in_the_end() -> None:
    policy = Fair(Fcfs())
    for number in range(6000):
        policy.arrived(sequence := live(number, f"key{number}"))
        policy.left(sequence)
    assert len(policy._service) <= 4097


@pytest.mark.parametrize("policy", [Fcfs, ByPriority, lambda: Fair(Fcfs()), lambda: Fair(ByPriority())])
def test_any_order_gives_the_same_answers_under_pressure(policy: Any) -> None:
    setup = FakeSetup(block_tokens=2, num_blocks=16, max_sequences=4)
    asked = [
        ask(f"r{n}", Sampling(9, temperature=1.0, seed=n, ignore_eos=True), (n, 1, 1, 2), key=f"k{n % 3}")
        for n in range(12)
    ]
    made = policy()
    if not isinstance(made, Fcfs) or isinstance(made, ByPriority):
        urgent = {n: n % 3 - 1 for n in range(12)} if order_looks_at_priority(made) else {}
        asked = [replace(request, priority=urgent.get(n, 0)) for n, request in enumerate(asked)]
    told = run(fake_engine(setup, LAWS, [ngram()], policy=made), asked)
    for request in asked:
        plain = replace(request, priority=0)
        assert told[request.id].tokens == run(fake_engine(FakeSetup(), LAWS), [plain])[request.id].tokens


def order_looks_at_priority(policy: Policy) -> bool:
    try:
        policy.check(ask("r", priority=1))
    except RequestError:
        return False
    return True


def test_a_group_computes_its_prompt_once() -> None:
    """n answers to one prompt: every full block of the prompt exists once, while all of them run."""
    setup = FakeSetup(block_tokens=4, num_blocks=64, knobs=Knobs(k=0, token_budget=64, adaptive=False))
    prompt = tuple(n % 12 for n in range(22))  # 5 full blocks and a part of one
    asked = [ask(f"r{n}", Sampling(8, seed=n, ignore_eos=True), prompt, group="g") for n in range(5)]
    engine = fake_engine(setup, LAWS)
    for request in asked:
        engine.submit(request)
    engine.step()
    assert (engine.status.running, engine.status.waiting) == (1, 4)
    engine.step()
    assert (engine.status.running, engine.status.waiting) == (5, 0)
    assert engine.status.blocks_owned == 5 + 5 * 1  # the shared ones, and the part of each
    computed = sum(plan.num_tokens for plan in engine._parts.runner.plans)  # type: ignore[attr-defined]
    assert computed == 22 + 1 + 4 * 2
    last = {delta.request: delta.statistics for delta in drained(engine)}
    assert [last[f"r{n}"].cached_tokens for n in range(5)] == [0, 20, 20, 20, 20]


def test_requests_without_a_group_do_not_wait_for_each_other() -> None:
    engine = fake_engine(FakeSetup(knobs=Knobs(k=0, token_budget=64, adaptive=False)), LAWS)
    for n in range(3):
        engine.submit(ask(f"r{n}", prompt=(1,) * 12))
    engine.step()
    assert engine.status.running == 3


@pytest.mark.parametrize(
    ("setup", "prompt", "sampling"),
    [
        (FakeSetup(prefix=False), (1,) * 12, ENDLESS),  # nothing is ever shared
        (FakeSetup(block_tokens=4), (1,) * 4, ENDLESS),  # no full block before the last token
        (FakeSetup(), (1,) * 12, replace(ENDLESS, prompt_logprobs=0)),  # each computes all of it
    ],
)
def test_a_group_that_cannot_share_does_not_wait(setup: FakeSetup, prompt: tuple[int, ...], sampling: Sampling) -> None:
    setup = replace(setup, knobs=Knobs(k=0, token_budget=64, adaptive=False))
    engine = fake_engine(setup, LAWS)
    for n in range(3):
        engine.submit(ask(f"r{n}", sampling, prompt, group="g"))
    engine.step()
    assert engine.status.running == 3


def test_when_the_first_of_a_group_leaves_the_next_one_computes() -> None:
    engine = fake_engine(FakeSetup(knobs=Knobs(k=0, token_budget=8, adaptive=False)), LAWS)
    for n in range(3):
        engine.submit(ask(f"r{n}", prompt=(1,) * 20, group="g"))
    engine.submit(ask("other", prompt=(2,) * 3))
    engine.step()
    assert engine.status.running == 1
    engine.abort("r0")
    told = {delta.request for delta in drained(engine)}
    assert told == {"r1", "r2", "other"}


def test_one_group_with_different_prompts_is_no_group() -> None:
    engine = fake_engine(FakeSetup(knobs=Knobs(k=0, token_budget=64, adaptive=False)), LAWS)
    for n in range(3):
        engine.submit(ask(f"r{n}", prompt=(n,) * 12, group="g"))
    engine.step()
    assert engine.status.running == 3
