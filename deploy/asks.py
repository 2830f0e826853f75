"""What crosses between the HTTP side and the engine replica: one ask in, pieces out.

Knows: the values, and that they are plain so that they can be sent between processes.
Refuses to know: HTTP and OpenAI on one side, token ids of text on the other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.messages import Statistics
from cluster.request import FinishReason, Sampling, Speculation

#: A conversation, oldest turn first, each {"role": ..., "content": ...}.
Conversation = tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class Words:
    """What an ask says in words and sampling wants in token ids; ids stand for themselves.

    think_end ends thinking after thinking_tokens; None: no budget.
    """

    thinking_tokens: int | None = None
    think_end: str | tuple[int, ...] = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """One continuation wanted.

    prompt: text as it is, token ids as they are, or a conversation to be put through the model's
    chat template.
    stream: whether pieces are wanted as they come or as one.
    echo: whether the first piece says the prompt again.
    group, key, priority, emitted, attempt: as in cluster.request.Request.
    """

    id: str
    prompt: str | tuple[int, ...] | Conversation
    sampling: Sampling
    speculation: Speculation = field(default_factory=Speculation)
    salt: str = ""
    stream: bool = True
    words: Words = field(default_factory=Words)
    group: str = ""
    key: str = ""
    priority: int = 0
    echo: bool = False
    emitted: tuple[int, ...] = ()
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Spelled:
    """One token and its raw log-probability; None: nothing comes before it.

    data: its bytes, maybe a part of a character. rank: 1 for the likeliest; 0: not known.
    """

    token: int
    text: str
    data: bytes
    logprob: float | None
    top: tuple[Spelled, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt said again: its text and its first token; `Piece.prompt_logprobs` tells of the others."""

    text: str
    first: Spelled


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one answer since its last piece.

    The last piece carries `finish`, the first that is not silent `prompt_logprobs` and `echo`, where they were
    asked for.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Spelled, ...] = ()
    finish: FinishReason | None = None
    statistics: Statistics = field(default_factory=Statistics)
    prompt_logprobs: tuple[Spelled, ...] = ()
    echo: Echo | None = None

    @property
    def silent(self) -> bool:
        """Whether it tells nothing: a sign that the engine is well and the answer waits."""
        told = self.tokens or self.text or self.prompt_logprobs or self.echo
        return not told and self.finish is None


@dataclass(frozen=True, slots=True)
class Card:
    """The served model, for /v1/models. `created` in Unix seconds."""

    id: str
    created: int
    max_context: int
    details: dict[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """Whoever answers asks: the engine replica, or a fake in a test."""

    def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Pieces of one answer; closing the iterator aborts it. Raises what cluster.errors names."""

    async def card(self) -> Card:
        """The model served."""

    async def status(self) -> dict[str, Any]:
        """Numbers of the engine, for /health; raises when it is not well."""
