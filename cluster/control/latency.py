"""What speculation gains, in closed form: tokens a step, and speed-ups over plain decoding.

Knows: acceptance, draft lengths, and the cost of drafting and verifying in units of one plain step.
Refuses to know: clocks, devices, sequences. Nothing here measures; `outrider simulate` holds measurements
against it.

Symbols: `alphas` the chance that a draft token stands given that those before it did, by position (the last
one holds beyond); k draft length; c a draft step, v a verification of k + 1 tokens, both over one plain step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def survival(alphas: Sequence[float], k: int) -> list[float]:
    """The chance that at least the first j drafts stand, for j = 0 .. k."""
    chances = [1.0]
    for position in range(k):
        chances.append(chances[-1] * alphas[min(position, len(alphas) - 1)])
    return chances


def expected_tokens(alphas: Sequence[float], k: int) -> float:
    """Tokens a verified draft of k yields, the target's own included: (1 - a^(k+1)) / (1 - a) for one alpha."""
    return sum(survival(alphas, k))


def serial(alphas: Sequence[float], k: int, c: float, v: float = 1.0) -> float:
    """Speed-up where k draft steps run before each verification."""
    return expected_tokens(alphas, k) / (v + k * c)


def one_pass(alphas: Sequence[float], k: int, c: float, v: float = 1.0) -> float:
    """Speed-up of a drafter that writes its k tokens in one pass of cost c."""
    return expected_tokens(alphas, k) / (v + c)


def best_k(speed_up: Callable[[int], float], most: int = 32) -> int:
    """The draft length, 0 to `most`, with the greatest speed-up; the shortest of equals."""
    return max(range(most + 1), key=lambda k: (speed_up(k), -k))


def pearl(alphas: Sequence[float], gamma: int) -> float:
    """Speed-up of PEARL (arXiv 2408.11850), gamma draft steps a target step.

    Verified drafts follow one another while all gamma tokens stand; a rejection costs one more target step, which
    checks the first token of the next draft alone and is wasted unless that stands.
    S = (a Y + r) / (a + r), with Y = sum of a^j for j < gamma and r = 1 - a^gamma.
    """
    chances = survival(alphas, gamma)
    first, rejected = chances[1], 1.0 - chances[gamma]
    if first == 0.0:
        return 1.0
    return (first * sum(chances[:gamma]) + rejected) / (first + rejected)


def ahead(hit: float, e_hit: float, e_miss: float = 1.0, predraft: float = 0.0, fallback: float = 0.0) -> float:
    """Speed-up of drafting ahead (SSD, arXiv 2603.03251, theorem 7), in units of one verification.

    hit: share of rounds whose draft was ready. e_hit, e_miss: tokens of a round with it and without.
    predraft: time the drafter takes beside a verification; fallback: time a miss takes to draft after all.
    """
    return (hit * e_hit + (1 - hit) * e_miss) / (hit * max(1.0, predraft) + (1 - hit) * (1 + fallback))


def cohort(hit: float, batch: int, e_hit: float, fallback: float) -> float:
    """Speed-up where every row waits if one misses: why no row of ours waits for another's draft."""
    return e_hit / (1 + (1 - hit**batch) * fallback)


@dataclass(frozen=True, slots=True)
class Hits:
    """How often a draft made ahead is there when the outcome is known.

    after_draft, after_plain: the chance following a round with a draft, and one without.
    """

    after_draft: float
    after_plain: float

    @property
    def share(self) -> float:
        """Of all rounds, in the long run: the stationary share of the two-state chain."""
        leave = 1 - self.after_draft
        return self.after_plain / (leave + self.after_plain) if leave + self.after_plain else 1.0


def hits(alphas: Sequence[float], k: int, fan_out: Sequence[int], plain_fan_out: int, miss_power: float) -> Hits:
    """Hit rates where `fan_out[n]` candidates are drafted for the outcome "n accepted", n = 0 .. k.

    The target's own token after a rejection is not among j candidates other than the rejected one with chance
    (1 + j) ** -miss_power. Where no draft was rejected (all k stood, or none was made) the likeliest token is a
    candidate too.
    """
    chances = survival(alphas, k)
    beyond = alphas[min(k, len(alphas) - 1)]

    def after_rejection(count: int) -> float:
        return 1 - math.pow(1 + count, -miss_power)

    def unrejected(alpha: float, count: int) -> float:
        return alpha + (1 - alpha) * after_rejection(count - 1) if count else 0.0

    rejected = sum((chances[n] - chances[n + 1]) * after_rejection(fan_out[n]) for n in range(k))
    return Hits(rejected + chances[k] * unrejected(beyond, fan_out[k]), unrejected(alphas[0], plain_fan_out))
