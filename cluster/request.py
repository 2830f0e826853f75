"""What one caller asks for: a prompt in token ids and how to sample its continuation.

Knows: the fields of a request, their units and their valid ranges.
Refuses to know: text, HTTP, scheduling, or how any field is put into effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from cluster.errors import RequestError

RuleName = Literal["coupled", "ratio"]
FinishReason = Literal["stop", "length", "abort"]

#: Most alternatives a caller may ask for beside each emitted token's log-probability.
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's law is shaped and when the answer ends. Immutable and validated.

    `seed` together with an absolute position names the random draw at that position; equal
    seeds on equal prompts give equal text whatever else runs beside the request.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 switches it off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none wanted; n: the emitted token's and the n likeliest

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "between 0 and 100")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "between 0 and 1")
        _require(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", self.repetition_penalty, "above 0")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", self.presence_penalty, "between -2 and 2")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", self.frequency_penalty, "between -2 and 2")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")
        _require(len(self.stop) <= 16, "stop", len(self.stop), "at most 16 strings")
        _require(all(self.stop), "stop", self.stop, "strings that are not empty")
        _require(len(self.logit_bias) <= 1024, "logit_bias", len(self.logit_bias), "at most 1024 entries")
        for token, bias in self.logit_bias.items():
            _require(token >= 0, "logit_bias", token, "token ids of 0 or more")
            _require(math.isfinite(bias) and abs(bias) <= 100, "logit_bias", bias, "between -100 and 100")
        if self.logprobs is not None:
            _require(0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", self.logprobs, f"between 0 and {MAX_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is taken, without noise."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True when the law at a position depends on which tokens came before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the caller says about drafting for this request; None leaves it to the engine."""

    enabled: bool = True
    k: int | None = None
    rule: RuleName | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        if self.k is not None:
            _require(0 <= self.k <= 64, "speculation.k", self.k, "between 0 and 64")


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation to generate.

    `id` is unique among live requests. `salt` separates tenants: nothing learned under one salt
    (prefix blocks, suffix statistics) is visible under another.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    speculation: Speculation = field(default_factory=Speculation)
    salt: str = ""

    def __post_init__(self) -> None:
        _require(len(self.prompt) > 0, "prompt", 0, "at least one token")


def _require(holds: bool, param: str, value: object, wanted: str) -> None:
    if not holds:  # also catches NaN, for which every comparison is false
        raise RequestError(f"{param}={value!r} is out of range: it must be {wanted}", param)
