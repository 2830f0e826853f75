"""Rounds played out by hand, and in the long run as the closed forms say."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.control.latency import expected_tokens, hits
from cluster.model.emulated import Acceptance, Script
from deploy.simulation.playback import Guesses, Played, play


def test_rounds_by_hand() -> None:
    # k = 2: [0 0 | 1] stands whole, [0 3] falls at the second, [2] at once; the last two positions are too few.
    ranks = np.array([[0, 0, 1, 0, 3, 2, 0, 0]])
    assert play(ranks, 2) == Played(tokens=(3 + 2 + 1) / 3, hit=1.0)
    # Of the bonus (rank 1) two candidates: ready. Of the rejection (rank 3) two others: a plain round, whose token
    # (rank 2) is not among two either.
    assert play(ranks, 2, Guesses((2, 2, 2), 2)) == Played(tokens=(3 + 2 + 1) / 3, hit=2 / 3)
    assert play(ranks, 2, Guesses((2, 3, 2), 2)).hit == 1.0
    assert play(ranks, 2, Guesses((2, 2, 1), 2)) == Played(tokens=(3 + 1 + 1 + 1) / 4, hit=2 / 4)


def test_in_the_long_run_the_closed_forms() -> None:
    alpha, k, guesses = 0.8, 5, Guesses((4, 3, 3, 2, 2, 4), 9)
    ranks = Script(0, 64, 3000).ranks(Acceptance((alpha,), 1.2), k)
    expected = hits([alpha], k, guesses.after_draft, guesses.after_plain, 1.2).share
    played = play(ranks, k, guesses)
    assert played.hit == pytest.approx(expected, abs=0.005)
    full = expected_tokens([alpha], k)
    assert played.tokens == pytest.approx(expected * full + 1 - expected, rel=0.01)
    assert play(ranks, k).tokens == pytest.approx(full, rel=0.01)


def test_a_text_too_short_for_a_round() -> None:
    assert play(np.zeros((1, 3), np.int64), 3) == Played(1.0, 0.0)
