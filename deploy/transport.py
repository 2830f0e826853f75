"""What Serve and Ray raise between two of our processes, as errors of ours.

Knows: the exceptions of ray and ray.serve.
Refuses to know: HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from actors import asking
from cluster.errors import EngineStopped, Overloaded, PeerLost
from deploy.asks import Ask, Card, Piece

#: Longest a question about state may take, in seconds.
ASK_S = 10.0
#: An engine that neither tells anything nor says that it is well (actors.verifier.LOOK_S) for so long is lost, in
#: seconds. Longer than its replica gives it (deploy.app.HEALTH_S): this is for replicas that are frozen themselves.
SILENT_S = 12.0


def translate(error: BaseException) -> BaseException:
    """The error of ours that `error` tells of, or `error` itself."""
    error = asking.translate(error)
    if isinstance(error, BackPressureError):
        return Overloaded("too many requests are waiting; try again later")
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return EngineStopped("no engine is running at the moment; try again later")
    return error


class EngineHandle:
    """A Backend over a Serve handle of the engine's deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """See Backend. Closing the iterator cancels the call in the replica, which aborts the request.

        Signs of life end here. PeerLost when they stay away; EngineStopped when none ever came.
        """
        response: Any = self._streaming.generate.remote(ask)
        taken = False
        try:
            while True:
                piece: Piece | None = await asking.within(anext(response, None), SILENT_S)
                if piece is None:
                    return
                taken = True
                if not piece.silent:
                    yield piece
        except TimeoutError:
            if taken:
                raise PeerLost(f"the engine gave no sign of life for {SILENT_S:g} s") from None
            raise EngineStopped(f"no engine took the request within {SILENT_S:g} s") from None
        except Exception as error:  # any error of the transport; the ones not known stay as they are
            raise translate(error) from error
        finally:
            response.cancel()

    async def card(self) -> Card:
        card: Card = await self._ask(self._handle.card.remote())
        return card

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self._ask(self._handle.status.remote())
        return status

    async def _ask(self, response: Any) -> Any:
        try:
            return await asking.ask(response, ASK_S)
        except RayError as error:
            raise translate(error) from error
        except PeerLost:
            response.cancel()
            raise
        except Exception as error:
            raise translate(error) from error
