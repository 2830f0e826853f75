"""An engine that counts: every request gets the letters a, b, c, ... one a step, no model behind it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from cluster.errors import Overloaded, PromptTooLong
from cluster.messages import Delta, Knobs, Statistics, TokenLogprob
from cluster.request import Request


@dataclass(frozen=True, slots=True)
class FakeStatus:
    running: int
    waiting: int
    steps: int
    blocks_total: int
    blocks_free: int


class FakeEngine:
    """Single-threaded like the real one, and checks it."""

    def __init__(self, step_s: float = 0.0, max_sequences: int = 8, max_prompt: int = 100) -> None:
        self._thread = threading.get_ident()
        self._live: dict[str, tuple[Request, int]] = {}
        self._steps = 0
        self.step_s = step_s
        self.max_sequences = max_sequences
        self.max_prompt = max_prompt
        self.knobs = Knobs()
        self.aborted: list[tuple[str, int]] = []
        self.fail_at: int | None = None  # a prompt token that makes the step crash
        self.seen: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def status(self) -> FakeStatus:
        self._check_thread()
        return FakeStatus(len(self._live), 0, self._steps, 100, 100 - len(self._live))

    def submit(self, request: Request) -> None:
        self._check_thread()
        if len(request.prompt) > self.max_prompt:
            raise PromptTooLong(f"the prompt has {len(request.prompt)} tokens, {self.max_prompt} fit", "prompt")
        if len(self._live) >= self.max_sequences:
            raise Overloaded("the waiting queue is full")
        self._live[request.id] = (request, 0)
        self.seen.append(request)

    def abort(self, request_id: str) -> None:
        self._check_thread()
        if self._live.pop(request_id, None) is not None:
            self.aborted.append((request_id, self._steps))

    def set_knobs(self, knobs: Knobs) -> None:
        self._check_thread()
        self.knobs = knobs

    def step(self) -> list[Delta]:
        self._check_thread()
        time.sleep(self.step_s)
        self._steps += 1
        deltas = []
        for request, done in list(self._live.values()):
            if self.fail_at in request.prompt:
                raise ZeroDivisionError("planted")
            done += 1
            finish = "length" if done >= request.sampling.max_tokens else None
            letter = chr(ord("a") + (done - 1) % 26)
            logprobs = (TokenLogprob(ord(letter), -0.5, ((ord(letter), -0.5), (ord("z"), -2.0))),)
            deltas.append(
                Delta(
                    request.id,
                    (ord(letter),),
                    letter,
                    logprobs if request.sampling.logprobs is not None else (),
                    finish,
                    Statistics(len(request.prompt), 1, done, done, 2 * done, done, (done,), (2 * done,)),
                )
            )
            self._live[request.id] = (request, done)
            if finish:
                del self._live[request.id]
        return deltas

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._thread, "the engine was touched from two threads"
