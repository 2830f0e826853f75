"""The process that verifies: one engine, its streams, its health.

Knows: how requests come in and deltas go out by the handful, and when this process is unwell.
Refuses to know: HTTP, text, placement, and what the engine does in a step. A plain class: the
launcher turns it into an actor; tests use it as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from actors.loop import EngineLoop, Phase, Progress, Steppable
from cluster.config import EngineConfig
from cluster.errors import EngineStopped, PeerLost, RequestError
from cluster.messages import Delta, Knobs
from cluster.model.info import ModelInfo
from cluster.request import Request

Answer = TypeVar("Answer")

#: A command waits at most for the step in progress; a step longer than this is a stuck one.
COMMAND_S = 30.0
#: Longest a step may take while work waits before the engine counts as stuck, in seconds.
STALL_S = 60.0
#: How often a stream without news looks whether the engine is still well, and says so, in seconds.
LOOK_S = 2.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What a verifier serves.

    tokenizer: directory of the tokenizer, on this machine.
    max_context: most tokens of prompt and answer together, as configured.
    lines: the resolved settings, ready to show.
    """

    model: ModelInfo
    tokenizer: str = ""
    max_context: int = 0
    lines: tuple[str, ...] = ()


class Verifier:
    """One engine in this process.

    The engine is built in the background: poll `progress` until its phase is RUNNING. `build`
    takes the configuration and a callback for progress lines and returns the engine and its
    standing; by default it assembles the real one.
    """

    def __init__(
        self,
        config: EngineConfig,
        build: Callable[[EngineConfig, Callable[[str], None]], tuple[Steppable, Standing]] | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._config = config
        self._build = build or assemble
        self._stall_s = stall_s
        self._standing: Standing | None = None
        self._mail: dict[str, _Mailbox] = {}
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._loop = EngineLoop(self._found, self._post, self._close_all)
        self._loop.start()

    # -- requests ----------------------------------------------------------------------------

    async def generate(self, request: Request, stream: bool = True) -> AsyncIterator[Delta]:
        """Chunks of one answer, each merging all that is ready; the last one carries `finish`.

        Without `stream` there is one chunk, the whole answer. Whenever there is nothing to tell for
        `LOOK_S`, a delta without anything in it says that the engine is well: whoever hears neither
        knows that this process is lost. Closing or cancelling the iterator frees the request's
        blocks before the engine's next step. Raises RequestError, Overloaded, EngineStopped.
        """
        self._asyncio = asyncio.get_running_loop()
        mailbox = _Mailbox()
        if request.id in self._mail:
            raise EngineStopped(f"request id {request.id} is already in use")
        self._mail[request.id] = mailbox
        finished = False
        taken = asyncio.ensure_future(self._ask(self._loop.submit(request)))
        try:
            while not (await asyncio.wait({taken}, timeout=LOOK_S))[0]:
                await self.check_health()
                yield Delta(request.id, (), "")
            await taken
            while not finished:
                delta = await self._next(request.id, mailbox, whole=not stream)
                finished = delta.finish is not None
                if delta.fault is not None:
                    raise RequestError(delta.fault.message, delta.fault.param)
                yield delta
        finally:
            self._mail.pop(request.id, None)
            taken.cancel()
            if not finished:
                self._loop.abort(request.id)

    async def _next(self, request_id: str, mailbox: _Mailbox, whole: bool) -> Delta:
        try:
            return await asyncio.wait_for(mailbox.take(whole), LOOK_S)
        except TimeoutError:
            await self.check_health()  # a slow step is waited for, a stuck or dead engine is not
            return Delta(request_id, (), "")

    async def abort(self, request_id: str) -> None:
        """Drop a request; its stream, if anyone still reads it, ends with finish "abort"."""
        mailbox = self._mail.get(request_id)
        self._loop.abort(request_id)
        if mailbox is not None:
            mailbox.put(Delta(request_id, (), "", finish="abort"))

    # -- state -------------------------------------------------------------------------------

    async def progress(self) -> Progress:
        """Never waits for the engine."""
        return self._loop.progress()

    async def status(self) -> Any:
        """The engine's EngineStatus between two steps."""
        return await self._ask(self._loop.status())

    async def info(self) -> Standing:
        """Model and resolved settings. EngineStopped before the engine stands."""
        if self._standing is None:
            raise EngineStopped("the engine is still being built")
        return self._standing

    async def check_health(self) -> None:
        """Health is forward progress. EngineStopped when the loop has ended, PeerLost when it is stuck."""
        now = self._loop.progress()
        if now.phase in (Phase.CRASHED, Phase.STOPPED):
            raise EngineStopped(f"the engine {now.phase.value}: {now.error!r}")
        if now.stalled_s > self._stall_s:
            raise PeerLost(f"work waits but no step has finished for {now.stalled_s:.0f} s (step {now.steps})")

    async def set_knobs(self, knobs: Knobs) -> None:
        """In force from the next step on."""
        await self._ask(self._loop.set_knobs(knobs))

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, finish live ones for at most `drain_s` seconds, then end them."""
        await asyncio.to_thread(self._loop.stop, drain_s)

    async def _ask(self, answer: Future[Answer]) -> Answer:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), COMMAND_S)
        except TimeoutError:
            raise PeerLost(f"the engine did not answer within {COMMAND_S:.0f} s") from None

    # -- the engine's thread -----------------------------------------------------------------

    def _found(self, report: Callable[[str], None]) -> Steppable:
        engine, self._standing = self._build(self._config, report)
        return engine

    def _post(self, deltas: Sequence[Delta]) -> None:
        self._in_asyncio(lambda: self._deliver(deltas))

    def _close_all(self, error: BaseException) -> None:
        def close() -> None:
            for mailbox in self._mail.values():
                mailbox.fail(error)

        self._in_asyncio(close)

    def _in_asyncio(self, action: Callable[[], None]) -> None:
        if self._asyncio is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens
                self._asyncio.call_soon_threadsafe(action)

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            mailbox = self._mail.get(delta.request)
            if mailbox is not None:
                mailbox.put(delta)


class _Mailbox:
    """Deltas of one request that nobody has fetched yet. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._waiting: list[Delta] = []
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()
        self._complete = asyncio.Event()

    def put(self, delta: Delta) -> None:
        self._waiting.append(delta)
        self._arrived.set()
        if delta.finish is not None:
            self._complete.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._arrived.set()
        self._complete.set()

    async def take(self, whole: bool) -> Delta:
        """Everything since the last call, merged; with `whole`, not before the answer is complete.

        Loses nothing when cancelled.
        """
        await (self._complete if whole else self._arrived).wait()
        if not self._waiting:
            raise self._error or EngineStopped("the stream ended without an answer")
        self._arrived.clear()
        if self._error is not None:
            self._arrived.set()
        waiting, self._waiting = self._waiting, []
        return merge(waiting)


def merge(deltas: Sequence[Delta]) -> Delta:
    """One delta that says what `deltas`, consecutive news of one request, say together."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    ends = next((i for i, delta in enumerate(deltas) if delta.finish is not None), len(deltas) - 1)
    told = deltas[: ends + 1]  # nothing is said after the end: an abort may cross a finish
    return Delta(
        request=last.request,
        tokens=tuple(token for delta in told for token in delta.tokens),
        text="".join(delta.text for delta in told),
        logprobs=tuple(entry for delta in told for entry in delta.logprobs),
        finish=told[-1].finish,
        statistics=max((delta.statistics for delta in told), key=lambda s: (s.output_tokens, s.rounds)),
        prompt_logprobs=tuple(entry for delta in told for entry in delta.prompt_logprobs),
        fault=told[-1].fault,
    )


def assemble(config: EngineConfig, report: Callable[[str], None]) -> tuple[Steppable, Standing]:
    """The real engine in this process alone. Imported here so that a test's process needs no tensor library."""
    from cluster.build import assemble as assemble_engine

    assembly = assemble_engine(config, report)
    return assembly.engine, standing_of(config, assembly)


def standing_of(config: EngineConfig, assembly: Any) -> Standing:
    """What an assembly (cluster/build.py) serves."""
    from cluster.model.load import locate

    directory = locate(config.target.tokenizer or config.target.model).directory
    resolved = assembly.resolved
    return Standing(resolved.model, str(directory), resolved.max_context, tuple(resolved.lines()))
