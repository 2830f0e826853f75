"""The Serve application: an HTTP ingress and, behind it, one engine in a process of its own.

Knows: deployments, their resources, and what travels between them.
Refuses to know: HTTP bodies (openai) and how an engine works (actors, cluster).

    proxy --> Ingress (FastAPI) --handle--> Engine replica --actor calls--> verifier
                                            owns a placement group: [verifier, shards, drafters]
                                            --loans--> Drafter replicas, where drafters are shared
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.metrics import Counter

from actors.asking import ASK_S, ask, translate
from actors.launch import Crew
from cluster.config import Config, parse, parse_knobs
from cluster.errors import EngineStopped, OutriderError, Overloaded, PeerLost, RequestError
from cluster.messages import Delta, TokenLogprob
from cluster.request import Request
from cluster.text.tokenizer import Tokenizer
from deploy.asks import Ask, Card, Echo, Piece, Spelled
from deploy.drafters import drafter_deployments, loans
from deploy.failover import Failover, Patience
from deploy.openai.answer import Service
from deploy.openai.routes import openai_app
from deploy.openai.stream import Json
from deploy.transport import EngineHandle
from deploy.transport import translate as translate_serve
from deploy.words import put_in_ids

#: CPUs reserved for the processes that only pass messages on. Fractions: all must fit on two cores.
INGRESS_CPUS, REPLICA_CPUS = 0.1, 0.1
#: How often the engine is asked whether it is well, and longest it may take to say so, in seconds. A machine that has
#: too much to do must not lose engines for it: replacing one makes more to do.
WATCH_S, HEALTH_S = 1.0, 10.0
#: Longest a replica may take to answer Serve; it never waits for its engine to do so. Serve replaces one that fails
#: three times in a row.
ANSWER_S = 5.0
#: Between finding the engine lost and ending the replica: time for its streams to say so.
LAST_WORDS_S = 0.3
#: Prompts longer than this many characters are encoded beside the event loop.
LONG_TEXT = 20_000

_log = logging.getLogger("ray.serve")


def build(args: dict[str, Any]) -> serve.Application:
    """Entry point of ray_config.yaml: `args` is the typed tree of cluster/config.py.

    Raises ConfigError with the path of what is wrong.
    """
    return application(parse(args), {})


def application(config: Config, overrides: Mapping[str, Mapping[str, Any]]) -> serve.Application:
    """The application. overrides: options by deployment name, as under `deployments` of a Serve config."""
    limit = config.scheduler.max_sequences + config.scheduler.max_waiting
    engine = serve.deployment(
        name="Engine",
        max_ongoing_requests=limit + 8,  # the engine's own queue is the one that says no
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        health_check_period_s=1,
        health_check_timeout_s=ANSWER_S,
        graceful_shutdown_timeout_s=10,
        max_constructor_retry_count=2,
    )(EngineReplica).options(**overrides.get("Engine", {}))
    ingress = serve.deployment(
        name="Ingress",
        max_ongoing_requests=limit + 64,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        health_check_period_s=1,
        health_check_timeout_s=ANSWER_S,
        graceful_shutdown_timeout_s=10,
    )(serve.ingress()(Ingress)).options(**overrides.get("Ingress", {}))
    drafters = drafter_deployments(config, overrides)
    serving = config.serving
    patience = Patience(serving.failovers, serving.failover_s)
    return ingress.bind(engine.bind(config, drafters), served_name(config), serving.max_tokens, patience)


def served_name(config: Config) -> str:
    """The model's id in the API."""
    return config.serving.name or Path(config.target.model).expanduser().name


class Ingress:
    """Speaks the OpenAI API over HTTP, and the same calls over a Serve handle."""

    def __init__(self, engine: Any, name: str, max_tokens: int, patience: Patience) -> None:
        self._failovers = Counter(
            "outrider_failovers", "Engines lost under a request, by what became of it.", tag_keys=("outcome",)
        )
        backend = Failover(EngineHandle(engine), patience, self._note)
        self._service = Service(backend, name, max_tokens)

    def _note(self, outcome: str, why: str) -> None:
        self._failovers.inc(1, {"outcome": outcome})
        _log.warning("an engine was lost under a request, %s: %s", outcome, why)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return openai_app(self._service, translate_serve)

    async def respond(self, endpoint: str, body: Json) -> Json:
        """A whole response; endpoint is "chat" or "text"."""
        return await self._service.whole(self._service.check(endpoint, body))

    async def respond_in_chunks(self, endpoint: str, body: Json) -> AsyncIterator[Json]:
        """The response's chunks, as the events of the HTTP stream."""
        async for chunk in self._service.chunks(self._service.check(endpoint, body)):
            yield chunk

    async def models(self) -> Json:
        return await self._service.models()

    async def health(self) -> Json:
        return await self._service.health()


class EngineReplica:
    """Thin: turns asks into requests and deltas into pieces; the engine is the verifier's."""

    async def __init__(self, config: Config, drafters: Mapping[int, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = config
        self._created = int(time.time())
        self._ending = False
        name = serve.get_replica_context().replica_id.unique_id
        self._crew = await Crew.start(config, name, _log.info, loans(config, drafters))
        self._verifier = self._crew.verifier
        self._standing = await ask(self._verifier.info.remote(), ASK_S)
        self._tokenizer = await asyncio.to_thread(Tokenizer.load, Path(self._standing.tokenizer))
        self._watching = asyncio.create_task(self._watch())

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Put `user_config` (keys of KnobConfig) into force without a restart."""
        knobs = parse_knobs(user_config, self._config.knobs).knobs()
        await ask(self._verifier.set_knobs.remote(knobs), ASK_S)
        _log.info("knobs in force: %s", knobs)

    async def generate(self, wanted: Ask) -> AsyncIterator[Piece]:
        """Pieces of one answer. Closing or cancelling aborts the request in the engine.

        PeerLost: the engine was lost under the request. EngineStopped: it was lost before, nothing was tried.
        """
        if self._ending:
            raise EngineStopped("this engine was lost and is being replaced")
        request = await self._request(wanted)
        echo = self._echo(wanted.prompt, request.prompt) if wanted.echo else None
        deltas = self._verifier.generate.options(num_returns="streaming").remote(request, wanted.stream)
        finished = False
        try:
            async for reference in deltas:
                delta = await reference
                finished = delta.finish is not None
                if delta.silent:
                    yield Piece("", ())
                    continue
                yield self._piece(delta, echo)
                echo = None
        except RayError as error:
            raise self._told(error) from error
        finally:
            if not finished:
                with suppress(RayError):
                    self._verifier.abort.remote(request.id)

    async def card(self) -> Card:
        info = self._standing.model
        return Card(served_name(self._config), self._created, self._standing.max_context, asdict(info))

    async def status(self) -> dict[str, Any]:
        """The engine's counts between two steps."""
        if self._ending:
            raise EngineStopped("this engine was lost and is being replaced")
        return asdict(await ask(self._verifier.status.remote(), HEALTH_S))

    async def check_health(self) -> None:
        """Well while the engine makes progress. Answers at once: only a replica that is stuck itself does not."""
        if self._ending or self._watching.done():
            raise EngineStopped("this engine was lost and is being replaced")

    async def _watch(self) -> None:
        """A replica without an engine ends, and is replaced."""
        try:
            while True:
                await self._crew.check(HEALTH_S)
                await asyncio.sleep(WATCH_S)
        except (OutriderError, RayError) as error:
            _log.warning("the engine is lost: %s", error)
            self._end()

    def _told(self, error: RayError) -> BaseException:
        """An error of the engine as those hear it whose request it had."""
        told = translate(error)
        if isinstance(told, RequestError | Overloaded) or not isinstance(told, OutriderError):
            return told
        if isinstance(error, RayActorError) or not isinstance(told, PeerLost):
            self._end()  # dead, or its loop has ended; otherwise it is only slow, and health says for how long
        return PeerLost(str(told))

    def _end(self) -> None:
        """Leave, with the time it takes to tell everyone whose request was here.

        The engine's processes are ended first, frozen ones too; that nobody outlives this process does not hang on it.
        """
        if self._ending:
            return
        self._ending = True
        threading.Timer(LAST_WORDS_S, os._exit, (1,)).start()
        with suppress(RayError):
            self._crew.end()

    async def _request(self, wanted: Ask) -> Request:
        encode: Callable[[Any], list[int]] = self._tokenizer.encode_chat
        prompt = wanted.prompt
        if isinstance(prompt, str):
            encode = self._tokenizer.encode
        elif prompt and isinstance(prompt[0], int):
            encode = list
        long = isinstance(prompt, str) and len(prompt) > LONG_TEXT
        ids = await asyncio.to_thread(encode, prompt) if long else encode(prompt)
        return Request(
            wanted.id,
            tuple(ids),
            put_in_ids(wanted.sampling, wanted.words, self._tokenizer),
            wanted.speculation,
            wanted.salt,
            wanted.group,
            wanted.key,
            wanted.priority,
            wanted.emitted,
            wanted.attempt,
        )

    def _echo(self, prompt: Any, ids: tuple[int, ...]) -> Echo:
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(ids)
        return Echo(text, replace(self._spelled(TokenLogprob(ids[0], 0.0)), logprob=None))

    def _piece(self, delta: Delta, echo: Echo | None) -> Piece:
        logprobs = tuple(self._spelled(entry) for entry in delta.logprobs)
        told = tuple(self._spelled(entry) for entry in delta.prompt_logprobs)
        return Piece(delta.text, delta.tokens, logprobs, delta.finish, delta.statistics, told, echo)

    def _spelled(self, entry: TokenLogprob) -> Spelled:
        top = tuple(
            self._spelled(TokenLogprob(token, logprob, rank=rank))
            for rank, (token, logprob) in enumerate(entry.top, start=1)
        )
        text = self._tokenizer.decode([entry.token])
        return Spelled(entry.token, text, self._tokenizer.lexicon[entry.token], entry.logprob, top, entry.rank)
