"""A drafter in a process of its own, for one verifier or several.

Knows: how it is built, and how verifiers are taken in while it drafts.
Refuses to know: who drafts how (cluster/draft), and who the verifiers are.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.loop import Progress
from actors.process import Background, Invitation, take_seat
from cluster.config import EngineConfig
from cluster.errors import EngineStopped, OutriderError
from cluster.parallel.topology import Seat

#: Longest an invited verifier may take to come, in seconds.
MEET_S = 30.0


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """verifiers: attached and not known to be lost; sequences: of all of them; version: of the weights."""

    verifiers: int
    sequences: int
    version: int


class Drafter:
    """Poll `progress` until its phase is RUNNING; then invite verifiers, any number at any time.

    build: makes the DraftServer; by default the real one.
    """

    def __init__(
        self,
        config: EngineConfig,
        seat: Seat,
        build: Callable[[EngineConfig, int, Callable[[str], None]], Any] | None = None,
    ) -> None:
        self._config = take_seat(config, seat)
        self._seat = seat
        self._build = build or _assemble
        self._server: Any = None
        self._stop = threading.Event()
        self._names = itertools.count()
        self._life = Background(self._work, f"the drafter of drafts.{seat.index}")
        self._life.start()

    async def progress(self) -> Progress:
        """Never waits for the model."""
        return self._life.progress

    async def invite(self, backend: str = "gloo") -> Invitation:
        """Expect one more verifier at the place returned. One that does not come in time is forgotten."""
        from cluster.parallel.groups import Rendezvous

        self._require_server()
        rendezvous = await asyncio.to_thread(Rendezvous.host, self._seat.address)
        place = rendezvous.endpoint
        invitation = Invitation(place.host, place.port, f"pair {next(self._names)}", backend)
        threading.Thread(target=self._receive, args=(invitation, rendezvous), name="invited", daemon=True).start()
        return invitation

    async def status(self) -> DrafterStatus:
        server = self._require_server()
        return DrafterStatus(server.verifiers, server.sequences, server.version)

    async def stop(self) -> None:
        """Leave every verifier and draft no more."""
        self._stop.set()

    def _require_server(self) -> Any:
        if self._server is None:
            raise EngineStopped("the drafter is still being built")
        return self._server

    def _work(self, report: Callable[[str], None], stand: Callable[[], None]) -> None:
        self._server = self._build(self._config, self._seat.index, report)
        stand()
        self._server.run(self._stop)

    def _receive(self, invitation: Invitation, rendezvous: Any) -> None:
        try:
            self._server.attach(meet_peer(invitation, 0, self._seat.kind.name))
        except OutriderError as error:
            logging.getLogger(__name__).warning("an invited verifier did not come: %s", error)
        finally:
            rendezvous.close()


def meet_peer(invitation: Invitation, rank: int, device: str) -> Any:
    """One end of the channel invited to; rank: 0 the drafter, 1 the verifier. Raises PeerLost."""
    import torch

    from cluster.parallel.groups import Endpoint
    from cluster.parallel.peer import meet

    where = torch.device(device) if invitation.backend != "gloo" else None
    endpoint = Endpoint(invitation.host, invitation.port)
    return meet(endpoint, rank, name=invitation.name, backend=invitation.backend, device=where, meet_s=MEET_S)


def _assemble(config: EngineConfig, index: int, report: Callable[[str], None]) -> Any:
    from cluster.build import assemble_drafter

    return assemble_drafter(config, index, report)
