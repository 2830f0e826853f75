"""The closed forms against the table they were first computed in, and against rounds played out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cluster.control import latency

#: Best serial k at c = .05, .1, .2; one pass k = 7, c = .1; PEARL gamma = 10; ahead k = 7 at hits .9, .8, .65 and 1.
TABLE = {
    0.6: (1.92, 1.67, 1.40, 2.23, 1.56, 2.31, 2.17, 1.95, 2.46),
    0.7: (2.35, 1.98, 1.58, 2.86, 1.94, 2.93, 2.71, 2.39, 3.14),
    0.8: (3.09, 2.47, 1.87, 3.78, 2.64, 3.85, 3.53, 3.05, 4.16),
    0.9: (4.67, 3.43, 2.37, 5.18, 4.20, 5.23, 4.76, 4.05, 5.70),
}


@pytest.mark.parametrize("alpha", TABLE)
def test_the_table(alpha: float) -> None:
    alphas = [alpha]

    def serial(c: float) -> float:
        return latency.serial(alphas, latency.best_k(lambda k: latency.serial(alphas, k, c)), c)

    full = latency.expected_tokens(alphas, 7)
    found = (
        *(serial(c) for c in (0.05, 0.1, 0.2)),
        latency.one_pass(alphas, 7, 0.1),
        latency.pearl(alphas, 10),
        *(latency.ahead(hit, full) for hit in (0.9, 0.8, 0.65)),
        full,
    )
    assert found == pytest.approx(TABLE[alpha], abs=0.0051)


def test_one_miss_stalls_a_cohort() -> None:
    full = latency.expected_tokens([0.8], 7)
    found = [latency.cohort(0.9, batch, full, 7 * 0.1) for batch in (1, 4, 8, 32)]
    assert found == pytest.approx([3.89, 3.35, 2.98, 2.48], abs=0.0051)


def test_a_miss_may_be_drafted_after_all_and_a_slow_drafter_holds_the_round() -> None:
    assert latency.ahead(0.8, 4.0, 4.0, fallback=0.5) == pytest.approx(4.0 / (0.8 + 0.2 * 1.5))
    assert latency.ahead(1.0, 4.0, predraft=1.25) == pytest.approx(4.0 / 1.25)


def test_acceptance_by_position() -> None:
    assert latency.survival([0.5, 0.8], 3) == pytest.approx([1, 0.5, 0.4, 0.32])
    assert latency.expected_tokens([0.5, 0.8], 3) == pytest.approx(2.22)
    assert latency.expected_tokens([1.0], 5) == 6


def test_a_draft_that_never_stands_gains_nothing() -> None:
    assert latency.best_k(lambda k: latency.serial([0.0], k, 0.1)) == 0
    assert latency.pearl([0.0], 5) == 1.0
    assert latency.pearl([1.0], 5) == pytest.approx(5.0)


def test_hit_rate_of_rounds_played_out() -> None:
    """Draws the outcome of many rounds, and looks whether its token was among the candidates."""
    random = np.random.default_rng(0)
    alpha, k, power, fan_out, plain = 0.7, 3, 1.5, (3, 2, 2, 4), 5
    drafted, after = True, {True: [], False: []}
    for _ in range(40_000):
        n = next((n for n in range(k) if random.random() >= alpha), k) if drafted else 0
        whole = not drafted or n == k
        rank = 0 if whole and random.random() < alpha else math.floor(random.random() ** (-1 / power))
        hit = rank < (fan_out[k] if drafted else plain) if whole else rank <= fan_out[n]
        after[drafted].append(hit)
        drafted = hit
    hits = latency.hits([alpha], k, fan_out, plain, power)
    assert np.mean(after[True]) == pytest.approx(hits.after_draft, abs=0.015)
    assert np.mean(after[False]) == pytest.approx(hits.after_plain, abs=0.02)
    assert np.mean(after[True] + after[False]) == pytest.approx(hits.share, abs=0.015)


def test_no_candidates_no_hits() -> None:
    hits = latency.hits([0.8], 2, (0, 0, 0), 0, 1.0)
    assert (hits.after_draft, hits.after_plain, hits.share) == (0, 0, 0)
    assert latency.hits([1.0], 2, (1, 1, 1), 1, 1.0).share == 1.0
