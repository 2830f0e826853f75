"""How long steps take."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.steptime import SIZES, StepTable, StepTimes, measure
from cluster.messages import Plan
from cluster.model.runner import Flight


def test_between_sizes_the_line_holds_and_beyond_them_it_goes_on() -> None:
    table = StepTable((1, 3, 5), (1.0, 2.0, 6.0))
    assert [table.at(n) for n in (0, 1, 2, 3, 4, 5, 6, 7)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert StepTable((4,), (2.0,)).at(100) == 2.0


@given(st.dictionaries(st.integers(1, 300), st.floats(0.001, 10.0), min_size=1, max_size=8))
def test_a_larger_step_never_takes_less(measured: dict[int, float]) -> None:
    table = StepTable.of(measured)
    times = [table.at(n) for n in range(1, 320)]
    assert all(a <= b + 1e-9 for a, b in pairwise(times))


class Timed:
    """A runner whose steps advance a clock of their own: 1 s, and 1 ms a token."""

    vocab_size = 4

    def __init__(self) -> None:
        self.now = 0.0
        self.plans: list[Plan] = []

    def launch(self, plan: Plan) -> Flight:
        self.plans.append(plan)
        self.now += 0.01 + 0.001 * plan.num_tokens + (0.1 if len(self.plans) % 3 == 1 else 0.0)
        return Flight(plan, torch.zeros(plan.num_tokens, 4))


def test_measuring_takes_the_fastest_of_several_and_fits_the_cache() -> None:
    runner = Timed()
    table = measure(runner, blocks=2, block_tokens=8, clock=lambda: runner.now)
    assert table.sizes == tuple(sorted(size for size in SIZES if size <= 16))
    assert table.seconds == pytest.approx([0.01 + 0.001 * size for size in table.sizes])
    for plan in runner.plans:
        assert max(plan.rows[0].blocks) < 2
        assert plan.rows[0].wants == plan.num_tokens


def test_measuring_stops_when_it_takes_too_long() -> None:
    runner = Timed()
    slow = measure(runner, blocks=99, block_tokens=8, clock=lambda: runner.now * 1000)
    assert slow.sizes == SIZES[:1]
    wide = measure(runner, blocks=99, block_tokens=8, patience_s=0.2, clock=lambda: runner.now)
    assert wide.sizes == (1, 64)


TABLE = StepTable((1, 10, 100), (1.0, 1.2, 6.0))


@pytest.mark.parametrize(("scale", "beyond"), [(1.0, 0.0), (1.0, 0.7), (2.5, 0.0), (0.5, 1.5), (2.0, 0.5)])
def test_a_slower_machine_and_a_cost_beyond_the_table_are_told_apart(scale: float, beyond: float) -> None:
    times = StepTimes(TABLE)
    for step in range(600):
        tokens = 1 + 37 * step % 100
        times.record(tokens, scale * TABLE.at(tokens) + beyond)
    assert times.at(50) == pytest.approx(scale * TABLE.at(50) + beyond, rel=0.03)
    assert times.at(100) / times.at(1) == pytest.approx((6 * scale + beyond) / (scale + beyond), rel=0.05)


def test_steps_of_one_size_are_expected_as_seen() -> None:
    times = StepTimes(TABLE)
    for _ in range(300):
        times.record(8, 3.0)
    assert times.at(8) == pytest.approx(3.0, rel=0.05)
    assert times.at(100) > times.at(8)


def test_steps_of_one_size_say_that_the_machine_is_slower() -> None:
    """Not that every step, also a smaller one, takes so much longer."""
    times = StepTimes(TABLE)
    for _ in range(300):
        times.record(100, 12.0)
    assert times.at(1) == pytest.approx(2.0, rel=0.05)


def test_one_hiccup_changes_little() -> None:
    times = StepTimes(TABLE)
    for step in range(300):
        times.record(1 + step % 20, TABLE.at(1 + step % 20))
    times.record(1, 1e9)
    assert times.at(1) < 1.2


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.0, 100.0)), max_size=30))
def test_whatever_is_seen_more_tokens_never_take_less(steps: list[tuple[int, float]]) -> None:
    times = StepTimes(TABLE)
    for tokens, seconds in steps:
        times.record(tokens, seconds)
        assert 0.0 < times.at(1) < times.at(10) < times.at(100)
