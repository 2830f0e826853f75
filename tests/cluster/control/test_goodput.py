"""Which drafts are verified: the choice is the best of all, found by trying every number of drafts of every row."""

from __future__ import annotations

from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.goodput import choose, choose_depth
from cluster.messages import Load

CHAINS = st.lists(st.floats(0.0, 1.0), max_size=4).map(lambda conditional: list(accumulate(conditional, mul)))
#: Rising, with kinks and plateaus: seconds of a step by its tokens.
RISES = st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 2.0]), min_size=40, max_size=40)


def brute(chances: list[list[float]], load: Load, seconds: list[float], drafting_s: float = 0.0) -> float:
    """The best rate of every choice there is."""
    rates = [load.rows / seconds[max(1, load.tokens)]]
    for counts in product(*(range(len(line) + 1) for line in chances)):
        if sum(counts):
            emitted = load.rows + sum(sum(line[:count]) for line, count in zip(chances, counts, strict=True))
            rates.append(emitted / (seconds[load.tokens + sum(counts)] + drafting_s))
    return max(rates)


@given(st.lists(CHAINS, max_size=4), RISES, st.integers(0, 3))
def test_no_other_choice_promises_more(chances: list[list[float]], rises: list[float], more: int) -> None:
    load = Load(max(1, len(chances)), len(chances) + more)
    seconds = list(accumulate(rises, initial=1.0))
    made = choose(chances, load, seconds.__getitem__)
    assert made.rate == pytest.approx(brute(chances, load, seconds))
    emitted = load.rows + sum(sum(line[:count]) for line, count in zip(chances, made.counts, strict=True))
    assert made.rate == pytest.approx(emitted / seconds[max(1, load.tokens + sum(made.counts))])


@given(st.lists(CHAINS, min_size=1, max_size=3), RISES, st.sampled_from([0.0, 0.05, 0.5, 3.0]))
def test_a_depth_is_chosen_with_what_its_passes_cost(
    chances: list[list[float]], rises: list[float], pass_s: float
) -> None:
    load = Load(len(chances), len(chances))
    seconds = list(accumulate(rises, initial=1.0))
    depth, made = choose_depth(chances, load, seconds.__getitem__, pass_s, (1, 2, 3, 4))
    best = max(brute([line[:d] for line in chances], load, seconds, d * pass_s) for d in range(5))
    assert made.rate == pytest.approx(best)
    assert max(made.counts, default=0) <= depth
    assert len(made.counts) == len(chances)


def test_dearer_steps_take_fewer_drafts_down_to_none() -> None:
    chain = [0.8**j for j in range(1, 9)]

    def counts(slope: float) -> int:
        return choose([chain], Load(1, 1), lambda tokens: 1.0 + slope * tokens).counts[0]

    found = [counts(slope) for slope in (0.0, 0.02, 0.1, 0.4, 1.0, 5.0)]
    assert found[0] == 8
    assert found == sorted(found, reverse=True)
    assert choose([[0.1]], Load(1, 1), lambda tokens: float(tokens)).counts == (0,)


@pytest.mark.parametrize(
    ("chances", "seconds", "rate"),
    [
        ([[1.0] * 4], [1.0, 1.0, 3.0, 3.0, 3.0, 3.0], 5 / 3),
        ([[0.9, 0.81, 0.73, 0.66]] * 4, [1.0] * 5 + [1.8] * 20, 16.4 / 1.8),
    ],
)
def test_a_step_up_is_climbed_where_the_floor_above_pays(
    chances: list[list[float]], seconds: list[float], rate: float
) -> None:
    made = choose(chances, Load(len(chances), len(chances)), seconds.__getitem__)
    assert made.counts == (4,) * len(chances)
    assert made.rate == pytest.approx(rate)


def test_the_surer_row_goes_first() -> None:
    made = choose([[0.9, 0.8], [0.3, 0.2]], Load(2, 2), lambda tokens: 1.0 + 0.5 * (tokens > 4))
    assert made.counts == (2, 0)
