"""Rounds played out over a text without time: what the luck of a finite text does to tokens a round.

Knows: which tokens of which positions the draft would have had right.
Refuses to know: milliseconds. A measurement of 50 rounds strays by a tenth from the closed forms by luck alone; that
part of a difference is computed here, exactly, so that it is not taken for something the devices did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Played:
    """tokens: of a row and round, the target's own included. hit: share of rounds with a draft."""

    tokens: float
    hit: float


@dataclass(frozen=True, slots=True)
class Guesses:
    """How many candidates are drafted ahead: for "n drafts stood", n = 0 .. k, and after a round without drafts."""

    after_draft: tuple[int, ...]
    after_plain: int


ALONE = Played(1.0, 0.0)


def play(texts: Iterable[npt.NDArray[np.int64]], k: int, guesses: Guesses | None = None) -> Played:
    """Over texts, each the ranks at its positions [P]; guesses None: every round has its draft.

    Rank r at a position: the target's token is the draft's likeliest but r.
    """
    tokens = rounds = drafted = 0
    for text in texts:
        ranks = text.tolist()
        place, ready = 0, True
        while place + k < len(ranks):
            stood = _stood(ranks[place : place + k]) if ready else 0
            rounds, drafted, tokens = rounds + 1, drafted + ready, tokens + stood + 1
            place += stood
            if guesses is not None:
                ready = _guessed(ranks[place], stood, k, guesses) if ready else ranks[place] < guesses.after_plain
            place += 1
    return Played(tokens / rounds, drafted / rounds) if rounds else ALONE


def _stood(ranks: Sequence[int]) -> int:
    return next((n for n, rank in enumerate(ranks) if rank), len(ranks))


def _guessed(rank: int, stood: int, k: int, guesses: Guesses) -> bool:
    """Whether the token after the drafts that stood was a candidate; the rejected one is none."""
    count = guesses.after_draft[stood]
    return rank < count if stood == k else rank <= count
