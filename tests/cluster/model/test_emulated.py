"""An emulated device keeps its times and its acceptance, and its text is the engine's answer."""

from __future__ import annotations

import time

import numpy as np
import pytest

from cluster.control.latency import expected_tokens
from cluster.control.length import LengthControl
from cluster.draft.first import FirstOffer
from cluster.draft.model import ModelProposer
from cluster.draft.proposer import Proposer
from cluster.engine import Engine, Parts
from cluster.errors import ConfigError
from cluster.kv.blocks import BlockPool
from cluster.kv.cache import KVCache
from cluster.kv.keys import KeyContext
from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.emulated import WIDTH, Acceptance, EmulatedRunner, Script, StepTimes
from cluster.request import Request, Sampling
from cluster.sched.scheduler import Limits, Scheduler
from cluster.verify.judge import Judge
from tests.fakes import run

INSTANT = StepTimes(((1, 0.0),))
PROMPT = 4


def plan(script: Script, *rows: tuple[int, int, int]) -> Plan:
    """Rows of (lane, first position, tokens), all positions wanted."""
    made = tuple(PlanRow(n, at, script.answer(lane, at, m), (0,), wants=m) for n, (lane, at, m) in enumerate(rows))
    return Plan(1, made, Knobs())


def cache() -> KVCache:
    return KVCache(BlockPool(512), 32, KeyContext("emulated"), prefix=False)


def engine(script: Script, proposers: list[Proposer], k: int) -> Engine:
    blocks = cache()
    return Engine(
        Parts(
            runner=EmulatedRunner(script, INSTANT),
            cache=blocks,
            scheduler=Scheduler(blocks, Limits(8, 8)),
            judge=Judge(script.vocab_size, frozenset(), None),
            proposer=FirstOffer(proposers),
            control=LengthControl(Knobs(k=k, adaptive=False, max_retries=10_000)),
            max_context=script.length - 1,
        )
    )


def drafter(script: Script, acceptance: Acceptance, k: int) -> ModelProposer:
    runner = EmulatedRunner(script, INSTANT, script.ranks(acceptance, k))
    return ModelProposer(runner, cache(), script.length - 1)


# Times


def test_times_between_and_beyond_the_points() -> None:
    times = StepTimes.parse("8:20,256:60", launch_ms=0.5)
    assert [times.ms(rows) for rows in (1, 8, 132, 256, 380)] == pytest.approx([20.5, 20.5, 40.5, 60.5, 80.5])
    assert [StepTimes.parse("2").ms(rows) for rows in (1, 500)] == [2, 2]
    assert times.scaled(0.5).ms(256) == pytest.approx(30.5)


@pytest.mark.parametrize("text", ["", "8:", "x:2", "8:20,8:30", "9:1,8:2", "0:1", "1:-2", "1:nan", "1:2,"])
def test_times_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="step times"):
        StepTimes.parse(text)


def test_a_step_takes_the_time_of_its_rows() -> None:
    script = Script(0, 4, 64)
    runner = EmulatedRunner(script, StepTimes.parse("1:5,16:20", launch_ms=1))
    began, cpu = time.perf_counter(), time.process_time()
    for rows in (((0, 2, 1),), ((0, 2, 8), (1, 4, 8))):
        runner.launch(plan(script, *rows))
    took, busy = time.perf_counter() - began, time.process_time() - cpu
    assert runner.meter.set_s == pytest.approx(0.027)
    assert took >= 0.027
    assert took - runner.meter.took_s < 0.05
    assert runner.meter.late_s == pytest.approx(runner.meter.took_s - 0.027)
    assert busy < 0.02
    assert (runner.meter.launches, runner.meter.rows) == (2, 17)


# Text


def test_the_target_says_its_script_and_nothing_of_another_lane() -> None:
    script = Script(3, 5, 64)
    logits = EmulatedRunner(script, INSTANT).launch(plan(script, (4, 0, 10), (1, 7, 3))).logits_NV
    said = logits.argmax(dim=1).tolist()
    assert said == [*script.answer(4, 1, 10), *script.answer(1, 8, 3)]
    assert {token // WIDTH for token in said[:10]} == {4}
    assert logits.topk(WIDTH).indices[12].div(WIDTH, rounding_mode="floor").unique().tolist() == [1]


def test_two_processes_would_make_the_same_script() -> None:
    one, other = Script(7, 3, 50), Script(7, 3, 80)
    assert np.array_equal(one.tokens_LP, other.tokens_LP[:, :50])
    assert np.array_equal(one.ranks(Acceptance((0.5,)), 3), other.ranks(Acceptance((0.5,)), 3)[:, :50])
    assert not np.array_equal(one.tokens_LP, Script(8, 3, 50).tokens_LP)


def test_ranks_keep_the_law_they_were_given() -> None:
    ranks = Script(0, 64, 2000).ranks(Acceptance((0.8,), miss_power=1.5), 7)
    assert np.mean(ranks == 0) == pytest.approx(0.8, abs=0.01)
    missed = ranks[ranks > 0]
    for j in (1, 2, 4):
        assert np.mean(missed > j) == pytest.approx((1 + j) ** -1.5, abs=0.015)


def test_the_draft_ranks_the_targets_token_where_it_was_told_to() -> None:
    script = Script(1, 4, 64)
    ranks = script.ranks(Acceptance((0.3,)), 7)
    logits = EmulatedRunner(script, INSTANT, ranks).launch(plan(script, (2, 0, 40))).logits_NV
    order = logits.argsort(dim=1, descending=True)
    found = [row.tolist().index(token) for row, token in zip(order, script.answer(2, 1, 40), strict=True)]
    assert found == ranks[2, 1:41].tolist()
    assert max(found) > 2


def test_acceptance_may_depend_on_the_run_of_agreements() -> None:
    agree = Script(0, 64, 2000).ranks(Acceptance((0.4, 0.9)), 7) == 0
    after_miss, after_hit = agree[:, 1:][~agree[:, :-1]], agree[:, 1:][agree[:, :-1]]
    assert np.mean(after_miss) == pytest.approx(0.4, abs=0.02)
    assert 0.8 < np.mean(after_hit) < 0.9  # anew after every full draft


@pytest.mark.parametrize("wrong", [{"alphas": ()}, {"alphas": (1.2,)}, {"alphas": (0.5,), "miss_power": 0.0}])
def test_acceptance_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Acceptance(**wrong)  # type: ignore[arg-type]


# In the engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_is_the_script_and_the_acceptance_comes_true(temperature: float) -> None:
    seen, count = (0.6, 0.75, 0.9, 0.7, 0.5), 600
    k = len(seen)
    script = Script(5, 8, PROMPT + count + 1)
    asked = [
        Request(str(lane), script.prompt(lane, PROMPT), Sampling(max_tokens=count, temperature=temperature, seed=lane))
        for lane in range(8)
    ]
    answers = run(engine(script, [drafter(script, Acceptance(seen), k)], k), asked)
    for lane in range(8):
        assert answers[str(lane)].tokens == script.answer(lane, PROMPT, count)
    totals = [answer.deltas[-1].statistics for answer in answers.values()]
    rounds, tokens = sum(s.rounds for s in totals), sum(s.output_tokens for s in totals)
    assert tokens / rounds == pytest.approx(expected_tokens(seen, k), rel=0.05)
    reached = np.array([rounds, *np.sum([s.accepted_by_position for s in totals], axis=0)])
    assert reached[1:] / reached[:-1] == pytest.approx(seen, abs=0.05)
