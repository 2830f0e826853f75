"""Which drafts are worth verifying: those that raise the expected tokens a second. Pure arithmetic.

Knows: chances, and seconds of a step by its tokens.
Refuses to know: where either comes from.

A step of `rows` sequences that computes `tokens` known tokens and the drafts chosen emits, on average, one token a row
and the sum of the chosen drafts' chances of standing. For any number of drafts the best are those with the greatest
chances; within a row chances never rise, so the best of all are a start of every row. Trying every number that could
still win finds the optimum, also where step times are jagged (DSpark's prefix scheduler stops at the first fall).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.messages import Load


@dataclass(frozen=True, slots=True)
class Choice:
    """How many drafts of each row, and the tokens a second to be expected."""

    counts: tuple[int, ...]
    rate: float


def choose(
    chances: Sequence[Sequence[float]], load: Load, seconds: Callable[[int], float], drafting_s: float = 0.0
) -> Choice:
    """The drafts of a step.

    chances: by row, of each draft in turn, never rising. seconds: of a step by the tokens it computes.
    drafting_s: what making the drafts takes, however many are chosen; nothing where none are.
    """
    counts = [0] * len(chances)
    best, chosen = load.rows / seconds(max(1, load.tokens)), 0
    order = sorted(((chance, -row) for row, line in enumerate(chances) for chance in line), reverse=True)
    emitted = float(load.rows)
    for number, (chance, _) in enumerate(order, 1):
        emitted += chance
        rate = emitted / (seconds(load.tokens + number) + drafting_s)
        if rate > best:
            best, chosen = rate, number
        left = len(order) - number
        # Seconds never fall and chances never rise: not even all that is left could win, were it for nothing.
        if emitted + chance * left <= best * (seconds(load.tokens + number) + drafting_s):
            break
    for _, row in order[:chosen]:
        counts[-row] += 1
    return Choice(tuple(counts), best)


def choose_depth(
    chances: Sequence[Sequence[float]],
    load: Load,
    seconds: Callable[[int], float],
    pass_s: float,
    depths: Sequence[int],
) -> tuple[int, Choice]:
    """How many passes a drafting model should make, pass_s seconds each, all rows together; and what is verified."""
    depth, best = 0, choose((), load, seconds)
    best = Choice((0,) * len(chances), best.rate)
    for tried in depths:
        made = choose([line[:tried] for line in chances], load, seconds, tried * pass_s)
        if made.rate > best.rate:
            depth, best = tried, made
    return depth, best
