"""Rank 0 of an engine in a process of its own: where the other ranks meet and drafters are attached.

Knows: what a verifier needs beside its engine once the engine is more than one process.
Refuses to know: requests and streams (verifier.py), and who starts the other processes (launch.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from actors.drafter import meet_peer
from actors.loop import Steppable
from actors.process import Invitation, take_seat
from actors.verifier import Standing, Verifier, standing_of
from cluster.config import EngineConfig
from cluster.errors import EngineStopped
from cluster.parallel.topology import Seat


class VerifierProcess(Verifier):
    """A verifier that has a process to itself, and perhaps others that work for it."""

    def __init__(self, config: EngineConfig, seat: Seat) -> None:
        config = take_seat(config, seat)
        self._seat = seat
        self._remote: Mapping[int, Any] = {}
        self._channels: dict[Invitation, Any] = {}
        self._rendezvous: Any = None
        if config.target.tensor_parallel > 1:
            from cluster.parallel.groups import Rendezvous

            self._rendezvous = Rendezvous.host(seat.address)  # bound now, told to the others afterwards
        super().__init__(config, self._assemble)

    async def meeting(self) -> Invitation:
        """Where ranks 1.. of the target meet this one."""
        place = self._rendezvous.endpoint
        return Invitation(place.host, place.port, "target")

    async def attach(self, index: int, invitation: Invitation) -> None:
        """Let whoever invites draft for position `index` of `drafts`. Raises PeerLost when nobody is there."""
        proposer = self._remote.get(index)
        if proposer is None:
            raise EngineStopped(f"the engine does not stand, or drafts.{index} drafts in its own process")
        channel = await asyncio.to_thread(meet_peer, invitation, 1, self._seat.kind.name)
        self._channels = {known: each for known, each in self._channels.items() if not each.wait_closed(0.0)}
        self._channels[invitation] = channel
        proposer.attach(channel)

    async def attached(self, invitation: Invitation) -> bool:
        """Whether the channel of an invitation still stands."""
        channel = self._channels.get(invitation)
        return channel is not None and not channel.wait_closed(0.0)

    async def detach(self, invitation: Invitation) -> None:
        """Let one drafter go; its sequences find another with their next row."""
        channel = self._channels.pop(invitation, None)
        if channel is not None:
            channel.close()

    async def pairs(self) -> int:
        """How many channels to drafters stand."""
        return sum(not channel.wait_closed(0.0) for channel in self._channels.values())

    def _assemble(self, config: EngineConfig, report: Callable[[str], None]) -> tuple[Steppable, Standing]:
        from cluster.build import Meeting, assemble

        meeting = None if self._rendezvous is None else Meeting(self._rendezvous.endpoint)
        assembly = assemble(config, report, meeting)
        self._remote = assembly.remote
        return assembly.engine, standing_of(config, assembly)
