"""How many outcomes of a verification to guess, by how many drafted tokens are accepted.

Knows: arithmetic on an acceptance and a budget.
Refuses to know: tokens, and who drafts after a guess (lookahead.py).

Source: theorem 12 of SSD (arXiv 2603.03251); PEARL (arXiv 2408.11850).
"""

from __future__ import annotations

from typing import Protocol

#: Chance of a miss among F guesses is taken to be F ** -_POWER (theorem 12).
_POWER = 1.0


class Guessing(Protocol):
    """How many outcomes to guess at each position of a draft."""

    def widths(self, alpha: float, length: int, budget: int) -> tuple[int, ...]:
        """Guesses after 0, 1, ..., `length` accepted tokens: length + 1 numbers, together at most `budget`."""


class FanOut:
    """More guesses where an outcome is likelier: theorem 12 of SSD."""

    def widths(self, alpha: float, length: int, budget: int) -> tuple[int, ...]:
        alpha = min(max(alpha, 0.01), 0.99)
        shares = [alpha ** (n / (1 + _POWER)) for n in range(length + 1)]
        shares[-1] *= (1 - alpha) ** (-1 / (1 + _POWER))
        exact = [share * budget / sum(shares) for share in shares]
        whole = [int(each) for each in exact]
        by_rest = sorted(range(length + 1), key=lambda n: (whole[n] - exact[n], n))
        for n in by_rest[: budget - sum(whole)]:
            whole[n] += 1
        return tuple(whole)


class AllAccepted:
    """One guess: everything is accepted, and the draft's own next token follows."""

    def widths(self, alpha: float, length: int, budget: int) -> tuple[int, ...]:  # noqa: ARG002 - Guessing
        return (0,) * length + (1,)
