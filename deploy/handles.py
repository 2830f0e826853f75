"""Carries bodies over a Serve handle of the application: no HTTP, from inside the cluster.

Knows: the methods of `deploy.app.Ingress`, and deadlines.
Refuses to know: what is in a body.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from queue import Empty, Queue
from typing import Any

from cluster.errors import PeerLost
from deploy.carriers import LOOK_S, What
from deploy.results import Json
from deploy.transport import translate


class AsyncHandleCarrier:
    """See AsyncCarrier."""

    def __init__(self, handle: Any, silence_s: float) -> None:
        self._handle = handle
        self._silence_s = silence_s

    async def whole(self, endpoint: str, body: Json) -> Json:
        return await _within(self._handle.respond.remote(endpoint, body), self._silence_s)

    async def chunks(self, endpoint: str, body: Json) -> AsyncGenerator[Json, None]:
        response = self._handle.options(stream=True).respond_in_chunks.remote(endpoint, body)
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    chunk = await anext(response, None)
                if chunk is None:
                    return
                yield chunk
        except TimeoutError:
            raise PeerLost(f"no answer within {self._silence_s:.0f} s") from None
        except Exception as error:  # any error of the transport; the ones not known stay as they are
            raise translate(error) from error
        finally:
            response.cancel()

    async def look(self, what: What) -> Json:
        return await _within(getattr(self._handle, what).remote(), LOOK_S)

    async def close(self) -> None:
        """Nothing is held."""


class HandleCarrier:
    """See Carrier. Runs an AsyncHandleCarrier on an event loop in a thread of its own."""

    def __init__(self, handle: Any, silence_s: float) -> None:
        self._carrier = AsyncHandleCarrier(handle, silence_s)
        self._silence_s = silence_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="handle-client", daemon=True)
        self._thread.start()

    def whole(self, endpoint: str, body: Json) -> Json:
        return self._wait(self._carrier.whole(endpoint, body), self._silence_s)

    def chunks(self, endpoint: str, body: Json) -> Generator[Json, None, None]:
        arrived: Queue[Json | BaseException | None] = Queue()

        async def pump() -> None:
            stream = self._carrier.chunks(endpoint, body)
            try:
                async for chunk in stream:
                    arrived.put(chunk)
                arrived.put(None)
            except Exception as error:  # told to the thread that waits, whatever it is
                arrived.put(error)
            finally:
                await stream.aclose()

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while True:
                try:
                    news = arrived.get(timeout=self._silence_s + 1.0)
                except Empty:
                    raise PeerLost(f"no answer within {self._silence_s:.0f} s") from None
                if news is None:
                    return
                if isinstance(news, BaseException):
                    raise news
                yield news
        finally:
            pumping.cancel()

    def look(self, what: What) -> Json:
        return self._wait(self._carrier.look(what), LOOK_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _wait(self, answer: Any, deadline_s: float) -> Json:
        body: Json = asyncio.run_coroutine_threadsafe(answer, self._loop).result(deadline_s + 1.0)
        return body


async def _within(response: Any, deadline_s: float) -> Json:
    try:
        async with asyncio.timeout(deadline_s):
            body: Json = await response
            return body
    except TimeoutError:
        response.cancel()
        raise PeerLost(f"no answer within {deadline_s:.0f} s") from None
    except Exception as error:  # any error of the transport; the ones not known stay as they are
        raise translate(error) from error
