"""A rank of a tensor-parallel target other than 0, in a process of its own.

Knows: that it meets the other ranks, then does what rank 0 says.
Refuses to know: requests, and what is computed. When rank 0 or another rank is gone this one is of no use:
the engine is replaced as a whole, and this process ends with its owner's handle.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.loop import Progress
from actors.process import Background, Invitation, take_seat
from cluster.config import EngineConfig
from cluster.parallel.topology import Seat


class Shard:
    """Poll `progress` until its phase is RUNNING."""

    def __init__(self, config: EngineConfig, seat: Seat) -> None:
        self._config = take_seat(config, seat)
        self._seat = seat
        self._life: Background | None = None

    async def follow(self, invitation: Invitation) -> None:
        """Load this rank's part and begin to follow; returns at once."""

        def work(report: Callable[[str], None], stand: Callable[[], None]) -> None:
            from cluster.build import Meeting, assemble_shard
            from cluster.parallel.groups import Endpoint

            report(f"loading rank {self._seat.index} of the target")
            meeting = Meeting(Endpoint(invitation.host, invitation.port))
            shard = assemble_shard(self._config, meeting, self._seat.index)
            stand()
            shard.follow()

        self._life = Background(work, f"rank {self._seat.index} of the target")
        self._life.start()

    async def progress(self) -> Progress:
        """Never waits for the model."""
        assert self._life is not None
        return self._life.progress
