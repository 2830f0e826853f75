"""Questions answered by the engine in every way it can, in turns, so that only ratios are read.

Knows: what is asked, and how one run is counted.
Refuses to know: what the counts mean (findings.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.build import Assembly
from cluster.errors import ConfigError
from cluster.messages import Delta
from cluster.request import Request, Sampling, Speculation
from cluster.text.tokenizer import Tokenizer
from deploy.demo import QUESTIONS

#: Batches measured, as far as the configuration lets so many run at once.
BATCHES = (1, 8)
LENGTHS = (1, 2, 4, 8, 15)


@dataclass(frozen=True, slots=True)
class Run:
    """Answers by question, and the figures of all together."""

    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    rounds: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]

    @property
    def speed(self) -> float:
        """Tokens a second, prompts included in the time."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def tau(self) -> float:
        """Tokens a round."""
        return sum(map(len, self.tokens)) / max(1, self.rounds)

    @property
    def alphas(self) -> tuple[float, ...]:
        """The chance that a draft stands given that those before it did, by position; as far as any was tried."""
        reached = [*self.drafted_by_position[:1], *self.accepted_by_position]
        return tuple(
            stood / min(tried, came)
            for stood, tried, came in zip(self.accepted_by_position, self.drafted_by_position, reached, strict=False)
            if min(tried, came) >= 4
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """One way of drafting at one batch: with it over without, the median of paired turns."""

    method: str
    batch: int
    k: int
    ratio: float
    tau: float
    alphas: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sameness:
    """Answers compared with those given alone and without drafts: how many are the same, token for token."""

    way: str
    same: int
    of: int


class Trials:
    """Runs of one assembled engine."""

    def __init__(self, made: Assembly, tokens: int, batch_limit: int) -> None:
        self._made = made
        self._tokens = tokens
        self.batches = tuple(batch for batch in BATCHES if batch <= batch_limit)
        room = made.resolved.max_context - tokens
        if room < 1:
            raise ConfigError(
                f"--tokens {tokens}: this model's context holds {made.resolved.max_context}, the question too"
            )
        self._prompts = [_encode(made.tokenizer, text)[:room] for _, text in QUESTIONS]

    def run(self, batch: int, speculation: Speculation, temperature: float = 0.0, first: int = 0) -> Run:
        """`batch` questions at once from the `first`-th on, to the end, with a cold prefix cache."""
        engine = self._made.engine
        engine.forget_prefixes()
        sampling = [Sampling(self._tokens, temperature=temperature, seed=first + row) for row in range(batch)]
        for row in range(batch):
            prompt = self._prompts[(first + row) % len(self._prompts)]
            engine.submit(Request(str(row), prompt, sampling[row], speculation))
        answers: list[list[int]] = [[] for _ in range(batch)]
        last: dict[str, Delta] = {}
        began = time.perf_counter()
        while engine.has_work:
            for delta in engine.step():
                answers[int(delta.request)].extend(delta.tokens)
                last[delta.request] = delta
        seconds = time.perf_counter() - began
        told = [delta.statistics for delta in last.values()]
        return Run(
            tuple(map(tuple, answers)),
            seconds,
            sum(one.rounds for one in told),
            _added([one.drafted_by_position for one in told]),
            _added([one.accepted_by_position for one in told]),
        )

    def sameness(self, methods: Sequence[str], temperature: float) -> list[Sameness]:
        """Every method, and batches without any, against answers given alone without drafts."""
        count, plain = max(self.batches), Speculation(enabled=False)
        alone = [self.run(1, plain, temperature, first).tokens[0] for first in range(count)]
        ways = [("in a batch", plain), *((f"with {name}", Speculation(method=name, k=8)) for name in methods)]
        found = []
        for way, speculation in ways:
            answers = self.run(count, speculation, temperature).tokens
            found.append(Sameness(way, sum(a == b for a, b in zip(answers, alone, strict=True)), count))
        return found

    def trial(self, method: str, batch: int, k: int, repeats: int) -> Trial:
        """With and without, in turns."""
        ratios, drafting = [], []
        for turn in range(repeats):
            without = self.run(batch, Speculation(enabled=False), first=turn)
            drafting.append(self.run(batch, Speculation(method=method, k=k), first=turn))
            ratios.append(drafting[-1].speed / without.speed)
        together = Run(
            tuple(answer for run in drafting for answer in run.tokens),
            sum(run.seconds for run in drafting),
            sum(run.rounds for run in drafting),
            _added([run.drafted_by_position for run in drafting]),
            _added([run.accepted_by_position for run in drafting]),
        )
        return Trial(method, batch, k, statistics.median(ratios), together.tau, together.alphas)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    if tokenizer.has_chat_template:
        return tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))
    return tuple(tokenizer.encode(text))


def _added(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    width = max(map(len, rows), default=0)
    return tuple(sum(row[at] for row in rows if at < len(row)) for at in range(width))
