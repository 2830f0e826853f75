"""What a client gets back: the API's JSON as typed values.

Knows: where each number stands in a response.
Refuses to know: how the response travelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """Draft tokens of one kind of draft."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one response and what speculation did for it, as docs/api.md tells."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted: int
    accepted: int
    rounds: int
    accepted_by_position: tuple[int, ...] = ()
    drafted_by_position: tuple[int, ...] = ()
    by_source: Mapping[str, Source] = field(default_factory=dict)
    preemptions: int = 0
    rule: str = ""
    lossy: bool = False
    failovers: int = 0

    @classmethod
    def read(cls, body: Json) -> Usage:
        ours = body["outrider"]
        return cls(
            prompt_tokens=body["prompt_tokens"],
            completion_tokens=body["completion_tokens"],
            cached_tokens=body["prompt_tokens_details"]["cached_tokens"],
            drafted=ours["drafted"],
            accepted=ours["accepted"],
            rounds=ours["rounds"],
            accepted_by_position=tuple(ours["accepted_by_position"]),
            drafted_by_position=tuple(ours["drafted_by_position"]),
            by_source={name: Source(**counts) for name, counts in ours["by_source"].items()},
            preemptions=ours["preemptions"],
            rule=ours["rule"],
            lossy=ours["lossy"],
            failovers=ours["failovers"],
        )

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that stood; 0.0 when none were drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens a target step emitted on average, the bonus token included; 0.0 before the first."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `logprobs` as the endpoint writes them, None when not asked for."""

    text: str
    finish: str | None
    logprobs: Json | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage

    @classmethod
    def read(cls, body: Json) -> Answer:
        choices = tuple(
            Choice(_text(choice, "message"), choice["finish_reason"], choice["logprobs"]) for choice in body["choices"]
        )
        return cls(body["id"], body["model"], choices, Usage.read(body["usage"]))

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def finish(self) -> str | None:
        """Why the first choice ended: "stop" or "length"."""
        return self.choices[0].finish


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a streamed response: text of one choice or, last of all, the usage."""

    text: str = ""
    index: int = 0
    finish: str | None = None
    logprobs: Json | None = None
    usage: Usage | None = None

    @classmethod
    def read(cls, body: Json) -> Chunk:
        usage = Usage.read(body["usage"]) if body.get("usage") else None
        if not body["choices"]:
            return cls(usage=usage)
        [choice] = body["choices"]
        return cls(_text(choice, "delta"), choice["index"], choice["finish_reason"], choice.get("logprobs"), usage)


@dataclass(frozen=True, slots=True)
class Model:
    """A model served. max_context in tokens, prompt and answer together."""

    id: str
    max_context: int
    details: Json

    @classmethod
    def read(cls, body: Json) -> Model:
        return cls(body["id"], body["max_context"], body["details"])


def _text(choice: Json, holder: str) -> str:
    text = choice["text"] if "text" in choice else choice[holder].get("content")
    return text or ""
