"""A device that is not there: steps that take set times, logits that make a set acceptance come true.

Knows: how long a forward pass takes by its rows, what every emulated text says, and how often and
how narrowly the emulated draft misses it.
Refuses to know: who calls. Engine, scheduler, judge, proposers and channels around it are the real
ones, in real time: only the forward pass is played, by sleeping.

A text is a lane. The token at position p of a lane is a keyed function of (seed, lane, p), and every
token names its lane, so that the runner reads the lane off the tokens it is given and keeps nothing
of any sequence. The target's logits are so sharp that neither noise nor a temperature up to 1 moves
its choice: the text is the same greedy and sampled, with any draft.

Legend of shape suffixes: N positions that want logits, V vocabulary, L lanes, P positions, W tokens of
a lane.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import ConfigError
from cluster.messages import Plan
from cluster.model.runner import Flight
from cluster.model.torch_runner import wanted_positions

#: Tokens a lane has: as many candidates can be ranked at a position.
WIDTH = 16
#: Between two ranks; above the span of 31-bit Gumbel noise (about -3 to 22).
_GAP = 32.0
#: Keyed streams of numbers a lane draws from.
_WORDS, _AGREEMENT, _MISSES = range(3)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long one forward pass takes by its rows, the tokens it computes.

    points: (rows, milliseconds), rows rising. Straight lines between them; fewer rows than the first
    take as long as the first (the weights are read whatever the rows), more than the last go on as
    the last line did.
    launch_ms: added to every pass.
    """

    points: tuple[tuple[int, float], ...]
    launch_ms: float = 0.0

    def __post_init__(self) -> None:
        rows = [row for row, _ in self.points]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            raise ConfigError(f"step times need rising numbers of rows, from 1: not {rows}")
        if not all(0 <= ms < math.inf for ms in (self.launch_ms, *(ms for _, ms in self.points))):
            raise ConfigError(f"step times must be milliseconds from 0: {self.points}, launch {self.launch_ms}")

    @staticmethod
    def parse(text: str, launch_ms: float = 0.0) -> StepTimes:
        """ "8:20,256:60": 20 ms up to 8 rows, 60 at 256. "2": 2 ms at any number. Raises ConfigError."""
        points = []
        for part in text.split(","):
            rows, colon, ms = part.rpartition(":")
            try:
                points.append((int(rows) if colon else 1, float(ms)))
            except ValueError:
                raise ConfigError(
                    f"step times {text!r}: write rows:milliseconds, as in 8:20,256:60, or one time"
                ) from None
        return StepTimes(tuple(points), launch_ms)

    def ms(self, rows: float) -> float:
        """Milliseconds a pass of this many rows takes."""
        xs, ys = (np.array(axis, np.float64) for axis in zip(*self.points, strict=True))
        if rows <= xs[-1] or len(xs) == 1:
            return self.launch_ms + float(np.interp(rows, xs, ys))
        return self.launch_ms + float(ys[-1] + (rows - xs[-1]) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))

    def scaled(self, factor: float) -> StepTimes:
        """The same device, this many times as slow; its launches cost what they did."""
        return StepTimes(tuple((rows, ms * factor) for rows, ms in self.points), self.launch_ms)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the draft's likeliest token is the target's, and how near it is where it is not.

    alphas: the chance that a draft token stands given that those before it did, by position; the last one holds
    beyond. One number: the same everywhere.
    miss_power: after a miss the target's token is not among the draft's next j with chance
    (1 + j) ** -miss_power (the power law of algorithm SSD, arXiv 2603.03251, theorem 12).
    """

    alphas: tuple[float, ...]
    miss_power: float = 1.0

    def __post_init__(self) -> None:
        if not self.alphas or not all(0.0 <= alpha <= 1.0 for alpha in self.alphas):
            raise ConfigError(f"acceptance must be one or more numbers from 0 to 1, not {self.alphas}")
        if self.miss_power <= 0:
            raise ConfigError(f"the power of misses must be above 0, not {self.miss_power}")

    def chances(self, k: int) -> npt.NDArray[np.float64]:
        """By position, of a draft of k tokens and the bonus token after it: float64 [k + 1]."""
        return np.array(self.alphas)[np.minimum(np.arange(k + 1), len(self.alphas) - 1)]


class Script:
    """What every lane says: tokens int64 [L, P], of which lane l owns the ids l W to l W + W - 1.

    Made alike in every process from (seed, lanes, length).
    """

    def __init__(self, seed: int, lanes: int, length: int) -> None:
        self.seed, self.lanes, self.length = seed, lanes, length
        words = np.stack([self._stream(lane, _WORDS).integers(WIDTH, size=length) for lane in range(lanes)])
        self.tokens_LP = words + WIDTH * np.arange(lanes)[:, None]

    @property
    def vocab_size(self) -> int:
        return self.lanes * WIDTH

    def prompt(self, lane: int, length: int) -> tuple[int, ...]:
        """The lane's first tokens."""
        return tuple(self.tokens_LP[lane, :length].tolist())

    def answer(self, lane: int, start: int, count: int) -> tuple[int, ...]:
        """What the target says at positions start, start + 1, ..."""
        return tuple(self.tokens_LP[lane, start : start + count].tolist())

    def ranks(self, acceptance: Acceptance, k: int) -> npt.NDArray[np.int64]:
        """At which rank the draft has the target's token, int64 [L, P]: 0 where they agree.

        The chance of agreement follows the run of agreements before it, and begins anew after a miss and after k + 1 of
        them: rounds of k drafts that follow one another see the acceptance by position that was asked for.
        """
        draws_LP = np.stack([self._stream(lane, _AGREEMENT).random(self.length) for lane in range(self.lanes)])
        spread_LP = np.stack([self._stream(lane, _MISSES).random(self.length) for lane in range(self.lanes)])
        # floor(v ** (-1 / r)) exceeds j with chance (1 + j) ** -r.
        near_LP = np.minimum(np.maximum(spread_LP, 1e-12) ** (-1.0 / acceptance.miss_power), WIDTH - 1).astype(np.int64)
        chances = acceptance.chances(k)
        agree_LP = np.empty(draws_LP.shape, np.bool_)
        run_L = np.zeros(self.lanes, np.int64)
        for position in range(self.length):
            agree_LP[:, position] = draws_LP[:, position] < chances[run_L]
            run_L = np.where(agree_LP[:, position], (run_L + 1) % (k + 1), 0)
        return np.where(agree_LP, 0, near_LP)

    def _stream(self, lane: int, stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, lane, stream))


@dataclass(slots=True)
class Meter:
    """What an emulated device did so far."""

    launches: int = 0
    rows: int = 0
    set_s: float = 0.0  # what the table asks for
    took_s: float = 0.0  # what passed
    late_s: float = 0.0  # of it, where making the logits or waking up took longer than the table says


class EmulatedRunner:
    """Runner (runner.py) of a device that computes one plan at a time.

    ranks: of the target's tokens in this model's eyes, as `Script.ranks` gives them; None for the target
    itself. Neither keys nor values are written.
    """

    def __init__(self, script: Script, times: StepTimes, ranks: npt.NDArray[np.int64] | None = None) -> None:
        self._script = script
        self._times = times
        self._ranks_LP = np.zeros_like(script.tokens_LP) if ranks is None else ranks
        self._ladder_WW = _ladder()
        self.meter = Meter()

    @property
    def vocab_size(self) -> int:
        return self._script.vocab_size

    def launch(self, plan: Plan) -> Flight:
        """The plan's logits, when the time its rows take has passed."""
        began = time.perf_counter()
        logits_NV = self._logits(plan)
        wanted_s = self._times.ms(plan.num_tokens) / 1e3
        while (left := began + wanted_s - time.perf_counter()) > 0:
            time.sleep(left)
        took_s = time.perf_counter() - began
        meter = self.meter
        meter.launches += 1
        meter.rows += plan.num_tokens
        meter.set_s += wanted_s
        meter.took_s += took_s
        meter.late_s += took_s - wanted_s
        return Flight(plan, logits_NV)

    def _logits(self, plan: Plan) -> torch.Tensor:
        """Float32 [N, V]: the lane's tokens by rank, every other far below."""
        wanted_N = wanted_positions(plan)
        tokens_N = np.fromiter((t for row in plan.rows for t in row.tokens), np.int64, plan.num_tokens)[wanted_N]
        next_N = np.fromiter((p + 1 for row in plan.rows for p in row.positions), np.int64)[wanted_N]
        lanes_N = tokens_N // WIDTH
        ranks_N = torch.from_numpy(self._ranks_LP[lanes_N, next_N])
        own_N1 = torch.from_numpy(self._script.tokens_LP[lanes_N, next_N] % WIDTH)[:, None]
        away_NW = (torch.arange(WIDTH) - own_N1) % WIDTH
        ids_NW = torch.from_numpy(lanes_N * WIDTH)[:, None] + torch.arange(WIDTH)
        logits_NV = torch.full((len(wanted_N), self.vocab_size), -_GAP * 2 * WIDTH)
        return logits_NV.scatter_(1, ids_NW, self._ladder_WW[ranks_N[:, None], away_NW])


def _ladder() -> torch.Tensor:
    """Logits [rank, d] of the token d after the target's own, where that own has this rank.

    Rank by rank from the likeliest: the tokens after the target's own in turn, the own put in at its rank.
    """
    ladder_WW = torch.empty(WIDTH, WIDTH)
    for rank in range(WIDTH):
        order = [*range(1, rank + 1), 0, *range(rank + 1, WIDTH)]
        ladder_WW[rank, torch.tensor(order)] = -_GAP * torch.arange(WIDTH, dtype=torch.float32)
    return ladder_WW
