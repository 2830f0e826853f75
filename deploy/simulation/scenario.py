"""What is simulated: devices by their step times, a pair by its acceptance, and who sits where.

Knows: the values a person may set, and what follows from them alone.
Refuses to know: how anything is run, predicted or shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from cluster.errors import ConfigError
from cluster.model.emulated import Acceptance, StepTimes

#: none: the target alone. colocated: the draft takes turns with the target on its devices.
Mode = Literal["none", "colocated"]
MODES: tuple[Mode, ...] = get_args(Mode)

#: Tokens of every prompt.
PROMPT = 8
#: Room for rounds before and after those that are measured.
_SPARE_S = 3.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One pair on its devices.

    k: draft length. target_devices: what the target's step times are the times of.
    seconds: how long each measurement runs.
    """

    target: StepTimes
    draft: StepTimes
    acceptance: Acceptance
    k: int = 7
    target_devices: int = 4
    seconds: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("k", "target_devices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.seconds <= 600:
            raise ConfigError(f"seconds must be above 0 and at most 600, not {self.seconds}")

    @property
    def length(self) -> int:
        """Positions a text needs so that no measurement reaches its end."""
        fastest_s = max(self.target.ms(1) / 1e3, 1e-4)
        return PROMPT + 1 + math.ceil((self.seconds + _SPARE_S) / fastest_s) * (self.k + 1)
