"""What one caller asks for: a prompt in token ids and how to sample its continuation.

Knows: the fields of a request, their units and their valid ranges.
Refuses to know: text, HTTP, scheduling, or how any field is put into effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

from cluster.errors import RequestError

RuleName = Literal["coupled", "ratio", "block", "threshold", "typical"]
FinishReason = Literal["stop", "length", "abort", "error"]

#: Most alternatives a caller may ask for beside each emitted token's log-probability.
MAX_LOGPROBS = 20
#: Most token-id sequences a caller may forbid, and the longest of them (also of an end mark), in tokens.
MAX_BAD, MAX_BAD_LEN = 1024, 64
#: And the longest text that may be forbidden, in characters.
MAX_BAD_WORD = 200
#: Most plugged-in logits processors of one request.
MAX_PROCESSORS = 16

#: Rules that need the law a draft was sampled from. Under the others a draft is best drawn with the target's own noise.
LAW_RULES: frozenset[RuleName] = frozenset({"ratio", "block"})

#: Fruitless rounds before a request's speculation pauses: the fewest and the most that may be asked for.
FEWEST_RETRIES, MOST_RETRIES = 3, 8


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
    prompt_logprobs: int | None = None  # the same for every prompt token after the first
    min_tokens: int = 0  # no end token and no stop string counts before that many tokens
    include_stop: bool = False  # keep the stop string (or the text of the stop id) that ended the answer
    allowed_ids: tuple[int, ...] | None = None  # None: all
    bad_ids: tuple[tuple[int, ...], ...] = ()  # sequences that the answer never completes
    bad_words: tuple[str, ...] = ()  # text that the answer never contains, however it is cut into tokens
    thinking_tokens: int | None = None  # after that many without `think_end`, `think_end` is what follows
    think_end: tuple[int, ...] = ()
    logits_processors: tuple[str, ...] = ()  # names of plugged-in processors, applied in this order

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
        if (asked := self.prompt_logprobs) is not None:
            _require(0 <= asked <= MAX_LOGPROBS, "prompt_logprobs", asked, f"between 0 and {MAX_LOGPROBS}")
        self._check_masks()
        self._check_thinking()

    def _check_masks(self) -> None:
        wanted = f"between 0 and max_tokens={self.max_tokens}"
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, wanted)
        if self.allowed_ids is not None:
            _require(len(self.allowed_ids) > 0, "allowed_ids", (), "at least one token id")
        _require(len(self.bad_ids) <= MAX_BAD, "bad_ids", len(self.bad_ids), f"at most {MAX_BAD} sequences")
        lengths = [len(sequence) for sequence in self.bad_ids]
        wanted = f"sequences of 1 to {MAX_BAD_LEN} token ids"
        _require(all(1 <= length <= MAX_BAD_LEN for length in lengths), "bad_ids", lengths, wanted)
        words = self.bad_words
        _require(len(words) <= MAX_BAD, "bad_words", len(words), f"at most {MAX_BAD} words")
        wanted = f"words of 1 to {MAX_BAD_WORD} characters"
        _require(all(1 <= len(word) <= MAX_BAD_WORD for word in words), "bad_words", words, wanted)
        names = self.logits_processors
        wanted = f"at most {MAX_PROCESSORS} names, none twice"
        _require(len(set(names)) == len(names) <= MAX_PROCESSORS, "logits_processors", names, wanted)

    def _check_thinking(self) -> None:
        length = len(self.think_end)
        if self.thinking_tokens is None:
            _require(length == 0, "think_end", self.think_end, "left out where thinking_tokens is not given")
            return
        _require(self.thinking_tokens >= 0, "thinking_tokens", self.thinking_tokens, "0 or more")
        _require(1 <= length <= MAX_BAD_LEN, "think_end", self.think_end, f"1 to {MAX_BAD_LEN} token ids")

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is taken, without noise."""
        return self.temperature == 0.0

    def ends(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Token ids that end the answer, of a model whose own are `eos_ids`."""
        return frozenset(self.stop_ids) | (frozenset() if self.ignore_eos else eos_ids)


class Threshold(Protocol):
    """How likely the target must find a draft under the rule `threshold`."""

    def at(self, emitted: int, outcomes: Sequence[tuple[int, int]]) -> float:
        """The threshold after `emitted` tokens and these (drafted, accepted) last rounds, oldest first."""


@dataclass(frozen=True, slots=True)
class FixedThreshold:
    """Always the same."""

    value: float = 0.5

    def __post_init__(self) -> None:
        _require(0.0 < self.value <= 1.0, "speculation.threshold.value", self.value, "above 0 and at most 1")

    def at(self, emitted: int, outcomes: Sequence[tuple[int, int]]) -> float:  # noqa: ARG002  # Threshold needs them
        return self.value


@dataclass(frozen=True, slots=True)
class ScheduledThreshold:
    """Strict at first, `drop` less with every `every` emitted tokens, never below `floor`."""

    start: float = 0.85
    drop: float = 0.02
    every: int = 100
    floor: float = 0.5

    def __post_init__(self) -> None:
        _require(0.0 < self.start <= 1.0, "speculation.threshold.start", self.start, "above 0 and at most 1")
        _require(0.0 <= self.drop <= 1.0, "speculation.threshold.drop", self.drop, "between 0 and 1")
        _require(self.every >= 1, "speculation.threshold.every", self.every, "at least 1")
        _require(0.0 < self.floor <= self.start, "speculation.threshold.floor", self.floor, "above 0, at most start")

    def at(self, emitted: int, outcomes: Sequence[tuple[int, int]]) -> float:  # noqa: ARG002  # Threshold needs it
        return max(self.floor, self.start - self.drop * (emitted // self.every))


@dataclass(frozen=True, slots=True)
class FollowingThreshold:
    """Keeps the share of drafts accepted near `acceptance`: higher after more, lower after fewer.

    Each round moves it by `step` times what that round's share was above or below.
    """

    start: float = 0.5
    acceptance: float = 0.7
    step: float = 0.1
    floor: float = 0.1
    ceiling: float = 0.95

    def __post_init__(self) -> None:
        _require(0.0 < self.floor <= self.start, "speculation.threshold.floor", self.floor, "above 0, at most start")
        _require(self.start <= self.ceiling <= 1.0, "speculation.threshold.ceiling", self.ceiling, "from start to 1")
        _require(0.0 < self.acceptance < 1.0, "speculation.threshold.acceptance", self.acceptance, "between 0 and 1")
        _require(0.0 < self.step <= 1.0, "speculation.threshold.step", self.step, "above 0 and at most 1")

    def at(self, emitted: int, outcomes: Sequence[tuple[int, int]]) -> float:  # noqa: ARG002  # Threshold needs it
        value = self.start
        for drafted, accepted in outcomes:  # held at the ends each time, so that a long run of luck is not owed back
            value += self.step * (accepted / drafted - self.acceptance)
            value = min(self.ceiling, max(self.floor, value))
        return value


@dataclass(frozen=True, slots=True)
class Typical:
    """Parameters of the rule `typical`: a draft stands while p >= min(epsilon, delta * exp(-entropy))."""

    epsilon: float = 0.09
    delta: float = 0.3


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the caller says about drafting for this request; None leaves it to the engine."""

    enabled: bool = True
    k: int | None = None
    rule: RuleName | None = None
    method: str | None = None
    threshold: Threshold | None = None  # of the rule `threshold`
    max_retries: int | None = None  # fruitless rounds before speculation pauses

    def __post_init__(self) -> None:
        if self.k is not None:
            _require(0 <= self.k <= 64, "speculation.k", self.k, "between 0 and 64")
        if self.max_retries is not None:
            _require(
                FEWEST_RETRIES <= self.max_retries <= MOST_RETRIES,
                "speculation.max_retries",
                self.max_retries,
                f"between {FEWEST_RETRIES} and {MOST_RETRIES}",
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation to generate.

    `id` is unique among live requests. `salt` separates tenants: nothing learned under one salt
    (prefix blocks, suffix statistics) is visible under another. Requests of one `group` have the
    same prompt and wait for the first of them to share its blocks. `priority`: lower goes first,
    where the scheduler's policy looks at it. `key`: whose request it is, for fairness; empty: the salt's.

    A request that goes on after its engine was lost carries the answer's tokens that were told
    already in `emitted`: it continues exactly there, with everything counted from the prompt, and
    only what is new is told. `attempt` is 0 for the first engine that serves a request and
    different for each later one, so that rules which draw anew each round never draw the same again.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    speculation: Speculation = field(default_factory=Speculation)
    salt: str = ""
    group: str = ""
    key: str = ""
    priority: int = 0
    emitted: tuple[int, ...] = ()
    attempt: int = 0

    def __post_init__(self) -> None:
        _require(self.attempt >= 0, "attempt", self.attempt, "0 or more")
        _require(len(self.prompt) > 0, "prompt", 0, "at least one token")
        _require(-(2**31) <= self.priority < 2**31, "priority", self.priority, "between -2**31 and 2**31 - 1")


def _require(holds: bool, param: str, value: object, wanted: str) -> None:
    if not holds:  # also catches NaN, for which every comparison is false
        raise RequestError(f"{param}={value!r} is out of range: it must be {wanted}", param)
