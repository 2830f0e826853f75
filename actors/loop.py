"""Runs one engine on one thread of its own.

Knows: when to step, when to sleep, in which order commands and steps happen, and whether the
engine is getting anywhere.
Refuses to know: Ray, asyncio, text, or what any command means to the engine.

    callers (any thread) --inbox--> [ build | drain inbox, step, drain inbox, step, ... ] --sink--> deltas

The engine is built, used and dropped on the loop's thread, so thread-local settings of the tensor
library hold for its whole life. Commands are drained between steps: an abort is in force before
the next step begins.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

from cluster.errors import EngineStopped, OutriderError
from cluster.messages import Delta, Knobs
from cluster.request import Request

Answer = TypeVar("Answer")

#: How long an idle loop sleeps before it looks around again, in seconds. A command wakes it at once.
IDLE_S = 1.0
#: Pause after a step that computed nothing although work waits, in seconds.
STAND_S = 0.001


class Steppable(Protocol):
    """The part of an engine that the loop drives."""

    @property
    def has_work(self) -> bool: ...
    @property
    def status(self) -> Any: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def set_knobs(self, knobs: Knobs) -> None: ...
    def step(self) -> list[Delta]: ...


class Phase(Enum):
    """What the loop is doing with its life."""

    BUILDING = "building"
    RUNNING = "running"
    STOPPED = "stopped"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Progress:
    """Is the engine getting anywhere? Read without waiting for the engine's thread.

    stalled_s: seconds since the last sign of progress while work waits; 0.0 when idle.
    news: the newest line of the build.
    """

    phase: Phase
    steps: int
    stalled_s: float
    news: str = ""
    error: BaseException | None = None


class EngineLoop:
    """Owns the thread and the engine on it.

    `sink` gets each step's deltas and `ended` the error that ended the loop (EngineStopped after
    an orderly stop); both are called on the loop's thread and must neither block nor raise.
    """

    def __init__(
        self,
        build: Callable[[Callable[[str], None]], Steppable],
        sink: Callable[[Sequence[Delta]], None],
        ended: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build = build
        self._sink = sink
        self._ended = ended
        self._clock = clock
        self._wake = threading.Condition()
        self._inbox: deque[tuple[Callable[[Steppable], Any], Future[Any]]] = deque()
        self._phase = Phase.BUILDING
        self._error: BaseException | None = None
        self._news = ""
        self._steps = 0
        self._moved_at = clock()
        self._busy = True
        self._stop_at: float | None = None  # on `clock`; None while nobody asked to stop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin building the engine; returns at once."""
        self._thread.start()

    def call(self, command: Callable[[Steppable], Answer]) -> Future[Answer]:
        """Run `command` on the engine between two steps.

        The future carries its result or error; EngineStopped when the loop ends first. Commands
        given while the engine is being built run as soon as it stands.
        """
        future: Future[Answer] = Future()
        with self._wake:
            if self._phase in (Phase.STOPPED, Phase.CRASHED):
                future.set_exception(self._farewell())
                return future
            if not self._busy:
                self._moved_at = self._clock()  # an idle loop was not stalled
                self._busy = True
            self._inbox.append((command, future))
            self._wake.notify()
        return future

    def submit(self, request: Request) -> Future[None]:
        """Add a request; RequestError or Overloaded arrive through the future."""

        def command(engine: Steppable) -> None:
            if self._stop_at is not None:
                raise EngineStopped("the engine is shutting down and takes no new requests")
            engine.submit(request)

        return self.call(command)

    def abort(self, request_id: str) -> Future[None]:
        """Drop a request before the next step."""
        return self.call(lambda engine: engine.abort(request_id))

    def set_knobs(self, knobs: Knobs) -> Future[None]:
        """Change the knobs from the next step on."""
        return self.call(lambda engine: engine.set_knobs(knobs))

    def status(self) -> Future[Any]:
        """The engine's own status, taken between two steps."""
        return self.call(lambda engine: engine.status)

    def progress(self) -> Progress:
        """Never waits: safe to call however stuck the engine is."""
        with self._wake:
            stalled = self._clock() - self._moved_at if self._busy and self._phase is Phase.RUNNING else 0.0
            return Progress(self._phase, self._steps, stalled, self._news, self._error)

    def stop(self, drain_s: float) -> None:
        """Refuse new requests, finish live ones for at most `drain_s` seconds, then end the thread.

        Returns when the thread has ended or `drain_s` and one more second have passed.
        """
        with self._wake:
            if self._stop_at is None:
                self._stop_at = self._clock() + drain_s
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(drain_s + 1.0)

    # -- the loop's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._build(self._report)
            with self._wake:
                self._phase = Phase.RUNNING
                self._moved_at = self._clock()
            while self._drain(engine):
                if engine.has_work:
                    deltas = engine.step()
                    self._mark(engine.status.steps)
                    if deltas:
                        self._sink(deltas)
            self._end(Phase.STOPPED, EngineStopped("the engine has stopped"))
        except Exception as error:  # the actor's outermost loop: whatever it was, streams must end
            logging.getLogger(__name__).exception("the engine loop ended on an error")
            self._end(Phase.CRASHED, error)

    def _drain(self, engine: Steppable) -> bool:
        """Run waiting commands; sleep while there is nothing to do. False when it is time to end."""
        while True:
            with self._wake:
                while not self._inbox and not engine.has_work:
                    self._busy = False
                    if self._stop_at is not None:
                        return False
                    self._wake.wait(IDLE_S)
                self._busy = True
                if self._stop_at is not None and self._clock() >= self._stop_at:
                    return False  # _end answers what is left in the inbox
                waiting = len(self._inbox)
            for _ in range(waiting):  # one by one: a crash leaves the rest in the inbox for _end
                _settle(*self._inbox.popleft(), engine)
            if engine.has_work:
                return True

    def _report(self, line: str) -> None:
        with self._wake:
            self._news = line

    def _mark(self, steps: int) -> None:
        """Note that the engine has done `steps` in its life; standing still is no progress."""
        with self._wake:
            moved = steps != self._steps
            self._steps = steps
            if moved:
                self._moved_at = self._clock()
        if not moved:
            time.sleep(STAND_S)

    def _end(self, phase: Phase, error: BaseException) -> None:
        with self._wake:
            self._phase, self._error, self._busy = phase, error, False
            left = list(self._inbox)
            self._inbox.clear()
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._farewell())
        self._ended(self._farewell())

    def _farewell(self) -> BaseException:
        """What callers are told once the loop has ended."""
        if isinstance(self._error, OutriderError):
            return self._error
        return EngineStopped(f"the engine crashed: {self._error!r}")


def _settle(command: Callable[[Steppable], Any], future: Future[Any], engine: Steppable) -> None:
    """Answer one command. A caller's mistake is the caller's; anything else is the loop's end."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        answer = command(engine)
    except OutriderError as error:
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(EngineStopped(f"the engine crashed: {error!r}"))
        raise
    else:
        future.set_result(answer)
