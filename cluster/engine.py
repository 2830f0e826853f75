"""The engine: requests in, deltas out, one step at a time.

Knows: the order of the step and the lifetime of a request.
Refuses to know: threads, processes, text protocols, and how any part does its work.

Single-threaded: every method is called from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cluster.control.length import LengthControl
from cluster.draft.proposer import Combiner
from cluster.errors import PromptTooLong, RequestError
from cluster.kv.cache import KVCache
from cluster.messages import Delta, Knobs
from cluster.model.runner import Runner
from cluster.request import Request, Sampling
from cluster.sched.scheduler import Scheduler
from cluster.verify.judge import Judge


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counts at one moment, between steps."""

    running: int
    waiting: int
    steps: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of; `build.py` makes them."""

    runner: Runner
    cache: KVCache
    scheduler: Scheduler
    judge: Judge
    proposer: Combiner
    control: LengthControl
    max_context: int
    close: Callable[[], None] = lambda: None  # ends what runs for the engine in other processes


class Engine:
    """See the module's docstring."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sequences: dict[str, int] = {}
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def knobs(self) -> Knobs:
        return self._parts.control.knobs

    @property
    def status(self) -> EngineStatus:
        counts = self._parts.cache.counts
        scheduler = self._parts.scheduler
        return EngineStatus(
            running=scheduler.running,
            waiting=scheduler.waiting,
            steps=self._steps,
            blocks_total=counts.total,
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            blocks_owned=counts.owned,
        )

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises RequestError (a field is wrong), PromptTooLong, or Overloaded; nothing is kept then.
        """
        request = self._fitted(request)
        parts = self._parts
        sequence = parts.scheduler.add(request)
        try:
            parts.judge.open(sequence, request)
        except RequestError:
            parts.scheduler.abort(sequence)
            raise
        self._sequences[request.id] = sequence
        parts.control.open(sequence, request.speculation.max_retries)
        parts.proposer.open(parts.scheduler.view(sequence, self.knobs))

    def abort(self, request_id: str) -> None:
        """Forget a request and return its blocks at once. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._parts.scheduler.abort(sequence)
            self._close([request_id])

    def step(self) -> list[Delta]:
        """One step of the target; news of every request that emitted tokens."""
        parts = self._parts
        knobs = parts.control.knobs
        offers = parts.judge.admit(parts.proposer.propose(parts.scheduler.views(knobs), knobs))
        began = time.perf_counter()
        drafts = parts.control.trim(offers, parts.scheduler.load(knobs))
        plan = parts.scheduler.plan(drafts, knobs)
        if not plan.rows:
            return []
        flight = parts.runner.launch(plan)
        laws = parts.judge.prepare(plan)
        verdicts = parts.judge.rule(flight, laws)
        deltas = parts.scheduler.commit(plan, verdicts)
        parts.proposer.settle(verdicts)
        parts.control.update(plan, verdicts, time.perf_counter() - began)
        self._steps += 1
        self._close(delta.request for delta in deltas if delta.finish is not None)
        return deltas

    def set_knobs(self, knobs: Knobs) -> None:
        """In force from the next step on."""
        self._parts.control.set(knobs)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that a measurement starts cold."""
        self._parts.cache.forget_prefixes()

    def close(self) -> None:
        """End what runs for this engine in other processes. It computes nothing afterwards; may be called twice."""
        self._parts.close()

    def check(self) -> None:
        """Raise BrokenInvariant unless the block law holds."""
        self._parts.scheduler.check()

    def _fitted(self, request: Request) -> Request:
        """The request with max_tokens cut to the room there is, or an error that says what to change."""
        parts = self._parts
        if request.id in self._sequences:
            raise RequestError(f"a request with id {request.id!r} is already running", "id")
        self._check_tokens(request)
        held = parts.cache.counts.total * parts.cache.block_tokens
        room = min(parts.max_context, held) - len(request.prompt)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt)} tokens; the model's context holds {parts.max_context} and "
                f"the cache {held}, one of them for the answer: shorten the prompt to "
                f"{min(parts.max_context, held) - 1} tokens"
                + ("" if parts.max_context <= held else " or raise cache.memory"),
                "prompt",
            )
        return replace(request, sampling=_cut(request.sampling, room))

    def _check_tokens(self, request: Request) -> None:
        vocab = self._parts.runner.vocab_size
        sampling = request.sampling
        fields = {
            "prompt": request.prompt,
            "emitted": request.emitted,
            "logit_bias": sampling.logit_bias,
            "stop_ids": sampling.stop_ids,
            "allowed_ids": sampling.allowed_ids or (),
            "bad_ids": [token for sequence in sampling.bad_ids for token in sequence],
            "think_end": sampling.think_end,
        }
        for param, tokens in fields.items():
            wrong = next((token for token in tokens if not 0 <= token < vocab), None)
            if wrong is not None:
                raise RequestError(f"{param} has token id {wrong}; this model's ids are 0 to {vocab - 1}", param)
        if sampling.bad_words and not self._parts.judge.reads_text:
            raise RequestError("bad_words needs an engine that reads text; give bad_ids", "bad_words")
        self._check_names(request)

    def _check_names(self, request: Request) -> None:
        plugged = self._parts.judge.processors
        unknown = next((name for name in request.sampling.logits_processors if name not in plugged), None)
        if unknown is not None:
            raise RequestError(
                f"logits_processors has {unknown!r}, which is not configured here; configured under processors: "
                f"{', '.join(plugged) or 'none'}",
                "logits_processors",
            )
        method = request.speculation.method
        known = self._parts.proposer.names
        if method is not None and method not in known:
            raise RequestError(
                f"speculation.method={method!r} is not configured here; configured: {', '.join(known) or 'none'}",
                "speculation.method",
            )

    def _close(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            sequence = self._sequences.pop(request_id)
            self._parts.judge.close(sequence)
            self._parts.proposer.close(sequence)
            self._parts.control.forget([sequence])


def _cut(sampling: Sampling, room: int) -> Sampling:
    """As asked, within the room there is."""
    longest = min(room, sampling.max_tokens)
    return replace(sampling, max_tokens=longest, min_tokens=min(longest, sampling.min_tokens))
