"""Bodies of the OpenAI API as we take them, and what they ask of the engine.

Knows: every field, which ones we serve, which ones cannot matter and which ones we must refuse.
Refuses to know: HTTP, how answers are written, and how any field is put into effect.

A field that could change the answer and is not served is refused by name: an answer that ignores
what was asked is worse than none. A field at a value that asks for nothing (tools: [], n: 1) is fine.
"""

from __future__ import annotations

import difflib
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from cluster.config_rules import FixedConfig, FollowingConfig, ScheduledConfig, ThresholdConfig
from cluster.errors import RequestError
from cluster.request import MAX_LOGPROBS, RuleName, Sampling, Speculation
from deploy.asks import Ask, Conversation
from deploy.openai.sampling import Ids, SamplingFields, StrictBody

#: Most answers one HTTP request may ask for (prompts times n).
MAX_CHOICES = 32
#: Most answers to one prompt that are shown, and that are made.
MAX_N, MAX_BEST_OF = 8, 16
#: Fields that say something about the caller or the bill, never about the answer.
INERT = frozenset({"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                   "prompt_cache_retention", "parallel_tool_calls", "verbosity"})  # fmt: skip
#: Fields of the API that change the answer and are not served (`echo`: by one endpoint), each with the values that
#: ask for nothing.
UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": ("none",), "web_search_options": (), "echo": (False,), "suffix": ("",),
}  # fmt: skip

Body = TypeVar("Body", bound="Common")


class StreamOptions(StrictBody):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class SpeculationOptions(StrictBody):
    """Our extension: how to draft for this request. Speed only, unless the rule is lossy (threshold, typical)."""

    enabled: StrictBool = True
    k: StrictInt | None = None
    rule: RuleName | None = None
    method: str | None = None
    threshold: ThresholdConfig | None = None
    max_retries: StrictInt | None = None

    def wish(self) -> Speculation:
        threshold = None if self.threshold is None else self.threshold.made()
        return Speculation(self.enabled, self.k, self.rule, self.method, threshold, self.max_retries)


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


class Turn(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, str]:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Common(SamplingFields):
    """What both endpoints share."""

    endpoint: ClassVar[str]

    model: str | None = None
    n: StrictInt | None = Field(None, ge=1, le=MAX_N)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # who asks: for fairness between callers
    # extensions
    best_of: StrictInt | None = Field(None, ge=1, le=MAX_BEST_OF)
    priority: StrictInt | None = None
    speculation: SpeculationOptions | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def echoes(self) -> bool:
        """Whether each answer begins with its prompt."""
        return False

    @property
    def silent(self) -> bool:
        """Whether no answer is wanted, only what is said of the prompt."""
        return False

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def prompts(self) -> list[str | tuple[int, ...] | Conversation]:
        raise NotImplementedError

    @property
    def per_prompt(self) -> int:
        """Answers made to each prompt."""
        return max(self.n or 1, self.best_of or 1)

    def asks(self, default_max_tokens: int) -> list[Ask]:
        """One ask a choice, in the order of the choices' indexes. RequestError names a bad field."""
        prompts, n = self.prompts(), self.per_prompt
        self._check_choices(len(prompts))
        if self.seed is None and n == 1:
            seeds = [secrets.randbits(62) for _ in prompts]
        else:
            seeds = [secrets.randbits(62) if self.seed is None else self.seed] * len(prompts)
        return [
            Ask(
                id=uuid.uuid4().hex,
                prompt=prompt,
                sampling=self._nth(self.sampling(default_max_tokens, seed + i), i),
                speculation=self.drafting(),
                stream=self.streams,
                words=self.words(),
                group=group if n > 1 else "",
                key=self.user or "",
                priority=self.priority or 0,
                echo=self.echoes,
            )
            for prompt, seed, group in zip(prompts, seeds, (uuid.uuid4().hex for _ in prompts), strict=False)
            for i in range(n)
        ]

    def _check_choices(self, prompts: int) -> None:
        name = "n" if self.per_prompt == (self.n or 1) else "best_of"
        if prompts * self.per_prompt > MAX_CHOICES:
            raise RequestError(f"{prompts} prompts times {name}={self.per_prompt} is over {MAX_CHOICES} answers", name)
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise RequestError(f"best_of={self.best_of} must be at least n={self.n}", "best_of")
        if self.streams and name == "best_of":
            raise RequestError("which answers are best is known when all are complete: best_of above n cannot stream",
                               "best_of")  # fmt: skip
        if self.streams and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs come with a whole response; leave out stream", "prompt_logprobs")

    def _nth(self, sampling: Sampling, i: int) -> Sampling:
        """The ith answer to a prompt: only the first tells of it, unless each does so in its own text; those to
        choose from are all measured."""
        if i and not self.echoes:
            sampling = replace(sampling, prompt_logprobs=None)
        choosing = self.per_prompt > (self.n or 1) and sampling.logprobs is None
        return replace(sampling, logprobs=0) if choosing else sampling

    def drafting(self) -> Speculation:
        return Speculation() if self.speculation is None else self.speculation.wish()


class ChatBody(Common):
    """POST /v1/chat/completions."""

    endpoint: ClassVar[str] = "chat"

    messages: list[Turn] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str | tuple[int, ...] | Conversation]:
        return [tuple(turn.plain() for turn in self.messages)]

    def length(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wanted_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
            return None
        return self.top_logprobs or 0


Texts = Annotated[list[str], Field(min_length=1)]


class TextBody(Common):
    """POST /v1/completions."""

    endpoint: ClassVar[str] = "text"

    prompt: str | Ids | Texts
    logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: StrictBool | None = None

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def silent(self) -> bool:
        return self.echoes and self.max_tokens == 0

    def length(self) -> int | None:
        return 1 if self.silent else self.max_tokens  # the engine always goes one token beyond a prompt

    def prompts(self) -> list[str | tuple[int, ...] | Conversation]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [part for part in self.prompt if isinstance(part, str)]
        return [*texts] or [tuple(part for part in self.prompt if isinstance(part, int))]

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def wanted_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echoes and self.prompt_logprobs is None else self.prompt_logprobs


#: Every name a location of an error may consist of.
_FIELDS = frozenset(
    name
    for model in (
        *(ChatBody, TextBody, Turn, TextPart, StreamOptions, SpeculationOptions),
        *(FixedConfig, ScheduledConfig, FollowingConfig),
    )
    for name in model.model_fields
)


def read(kind: type[Body], body: Any) -> Body:
    """A checked body. RequestError names the first field that is wrong and how."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    kept = {}
    unserved = UNSERVED.keys() - kind.model_fields.keys()
    for name, value in body.items():
        if name in INERT or (name in unserved and (value is None or value in UNSERVED[name])):
            continue
        if name in unserved:
            raise RequestError(f"{name}={_short(value)} is not supported by this server; leave it out", name)
        kept[name] = value
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise _explain(error, kind) from None


def _explain(error: ValidationError, kind: type[Common]) -> RequestError:
    # A union complains once for each of its members: the deepest complaint is about the member meant.
    worst = max(error.errors(include_url=False), key=lambda detail: len(detail["loc"]))
    unknown = worst["type"] == "extra_forbidden"
    end = len(worst["loc"]) - 1
    named = [  # the rest of a location names members of unions
        place
        for at, place in enumerate(worst["loc"])
        if isinstance(place, int) or place in _FIELDS or (unknown and at == end)
    ]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in named).lstrip(".")
    if worst["type"] == "missing":
        return RequestError(f"the field {param!r} is missing", param)
    if unknown:
        near = difflib.get_close_matches(str(worst["loc"][-1]), kind.model_fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near and len(worst["loc"]) == 1 else ""
        return RequestError(f"the field {param!r} is not known{hint}", param)
    return RequestError(f"{param}={_short(worst['input'])}: {worst['msg'].lower()}", param)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
