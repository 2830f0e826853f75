"""What is simulated: devices by their step times, a pair by its acceptance, and who sits where.

Knows: the values a person may set, and what follows from them alone.
Refuses to know: how anything is run, predicted or shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from cluster.errors import ConfigError
from cluster.model.emulated import Acceptance, StepTimes

#: none: the target alone. colocated: the draft takes turns with the target on its devices. sync: the draft has its own,
#: and the target waits for it. lookahead, pearl: it drafts while the target verifies, for many outcomes or for one.
Mode = Literal["none", "colocated", "sync", "lookahead", "pearl"]
MODES: tuple[Mode, ...] = get_args(Mode)

#: Tokens of every prompt.
PROMPT = 8
#: Room for rounds before and after those that are measured.
_SPARE_S = 3.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One pair on its devices.

    k: draft length. budget: outcomes guessed ahead a sequence and round; most_rows: of all sequences of a drafter.
    wait_ms: how long a row waits for the answer of a drafter that drafts ahead.
    drafters: draft devices, one process each. target_devices: what the target's step times are the times of.
    seconds: how long each measurement runs.
    """

    target: StepTimes
    draft: StepTimes
    acceptance: Acceptance
    k: int = 7
    budget: int = 16
    most_rows: int = 96
    wait_ms: float = 12.0
    drafters: int = 1
    target_devices: int = 4
    seconds: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("k", "budget", "most_rows", "drafters", "target_devices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.wait_ms <= 1000:
            raise ConfigError(f"wait_ms must be above 0 and at most 1000, not {self.wait_ms}")
        if not 0 < self.seconds <= 600:
            raise ConfigError(f"seconds must be above 0 and at most 600, not {self.seconds}")

    def devices(self, mode: Mode) -> int:
        """How many devices a mode occupies."""
        return self.target_devices + (0 if mode in ("none", "colocated") else self.drafters)

    def wider(self, target: StepTimes | None, efficiency: float) -> Scenario:
        """The draft devices given to the target instead.

        target: its step times then; None assumes that the added devices take their share of the work at this
        efficiency: 1 would be times divided by exactly as much as there are more devices.
        """
        devices = self.target_devices + self.drafters
        if not 0 < efficiency <= 1:
            raise ConfigError(f"the efficiency of a wider target must be above 0 and at most 1, not {efficiency}")
        speed = 1 + (devices / self.target_devices - 1) * efficiency
        return replace(self, target=target or self.target.scaled(1 / speed), target_devices=devices)

    @property
    def length(self) -> int:
        """Positions a text needs so that no measurement reaches its end."""
        fastest_s = max(self.target.ms(1) / 1e3, 1e-4)
        return PROMPT + 1 + math.ceil((self.seconds + _SPARE_S) / fastest_s) * (self.k + 1)
