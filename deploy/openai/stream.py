"""Pieces of answers written as the OpenAI API writes them.

Knows: the JSON of chat and text completions, whole and in chunks, and of usage.
Refuses to know: HTTP, where pieces come from, and what was asked beyond its shape.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from cluster.messages import SourceCount, Statistics
from cluster.request import FinishReason
from deploy.asks import Piece, Spelled

Json = dict[str, Any]


@dataclass(slots=True)
class _Choice:
    """What has been said so far of one choice."""

    text: str = ""
    logprobs: list[Spelled] = field(default_factory=list)
    prompt_logprobs: tuple[Spelled, ...] = ()
    echoed: int = 0  # entries of `logprobs` that are the prompt's
    finish: str | None = None
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def mean_logprob(self) -> float:
        """Of the answer's tokens, raw: how likely the model found it, whatever its length."""
        own = [entry.logprob or 0.0 for entry in self.logprobs[self.echoed :]]
        return sum(own) / max(1, len(own))


@dataclass(frozen=True, slots=True)
class Layout:
    """What a response consists of.

    count: answers made, `per_prompt` consecutive ones to each prompt, of which the best `shown` are
    shown. logprobs, prompt_logprobs: whether they are told. usage_last: whether chunks carry
    `usage`, null in all but the last. silent: what is said of the prompt is all that is wanted.
    """

    count: int
    per_prompt: int = 1
    shown: int = 1
    logprobs: bool = False
    prompt_logprobs: bool = False
    usage_last: bool = False
    silent: bool = False


class Writer(ABC):
    """Writes one response: `chunk` for each piece of a stream, or `add` and then `whole`.

    model: name to put into the response.
    """

    prefix: ClassVar[str]
    object_whole: ClassVar[str]
    object_chunk: ClassVar[str]

    def __init__(self, model: str, layout: Layout) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._choices = [_Choice() for _ in range(layout.count)]
        self._layout = layout
        self._logprobs = layout.logprobs

    def openings(self) -> list[Json]:
        """Chunks that come before any text."""
        return []

    def add(self, index: int, piece: Piece) -> None:
        self._take(index, self._shown(piece))

    def _shown(self, piece: Piece) -> Piece:
        """What of a piece is put into the response, and in which place."""
        return piece

    def _take(self, index: int, piece: Piece) -> None:
        choice = self._choices[index]
        choice.text += piece.text
        choice.logprobs.extend(piece.logprobs)
        choice.prompt_logprobs += piece.prompt_logprobs
        if piece.echo is not None and self._logprobs:
            choice.echoed = 1 + len(piece.prompt_logprobs)
        choice.finish = piece.finish or choice.finish
        choice.statistics = piece.statistics

    def chunk(self, index: int, piece: Piece) -> Json | None:
        """One chunk of a stream; None when the piece has nothing to show."""
        said = len(self._choices[index].text)
        piece = self._shown(piece)
        self._take(index, piece)
        if not piece.text and not piece.logprobs and piece.finish is None:
            return None
        body = self._chunk_choice(index, piece, said)
        return self._chunk_of([body])

    def usage_chunk(self) -> Json:
        """The last chunk of a stream whose caller asked for usage."""
        return self._chunk_of([]) | {"usage": self.usage()}

    def whole(self) -> Json:
        choices = [
            self._whole_choice(index, choice) | self._told(first) for index, (first, choice) in enumerate(self._best())
        ]
        return {**self._head, "object": self.object_whole, "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Of all answers made, shown or not."""
        return usage([choice.statistics for choice in self._choices], self._layout.per_prompt)

    def _best(self) -> list[tuple[_Choice, _Choice]]:
        """The first answer made to the same prompt, and the answer, for each answer shown."""
        per_prompt, shown = self._layout.per_prompt, self._layout.shown
        best: list[tuple[_Choice, _Choice]] = []
        for start in range(0, len(self._choices), per_prompt):
            made = self._choices[start : start + per_prompt]
            if shown < per_prompt:
                made = sorted(made, key=lambda choice: choice.mean_logprob, reverse=True)
            best.extend((self._choices[start], choice) for choice in made[:shown])
        return best

    def _told(self, first: _Choice) -> Json:
        """What the model thought of the prompt, told with the first answer made to it."""
        if not self._layout.prompt_logprobs:
            return {}
        return {"prompt_logprobs": [None, *(_prompt_logprob(entry) for entry in first.prompt_logprobs)]}

    def _chunk_of(self, choices: list[Json]) -> Json:
        chunk = {**self._head, "object": self.object_chunk, "choices": choices}
        return chunk | {"usage": None} if self._layout.usage_last else chunk

    @abstractmethod
    def _chunk_choice(self, index: int, piece: Piece, said: int) -> Json:
        """One choice's part of a chunk; `said` characters of it came before."""

    @abstractmethod
    def _whole_choice(self, index: int, choice: _Choice) -> Json:
        """One choice's part of a whole response."""


class ChatWriter(Writer):
    prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def openings(self) -> list[Json]:
        return [
            self._chunk_of([{"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            for i in range(len(self._choices))
        ]

    def _chunk_choice(self, index: int, piece: Piece, said: int) -> Json:  # noqa: ARG002  # TextWriter needs it
        delta = {"content": piece.text} if piece.text else {}
        return {
            "index": index,
            "delta": delta,
            "logprobs": _chat_logprobs(piece.logprobs) if self._logprobs else None,
            "finish_reason": piece.finish,
        }

    def _whole_choice(self, index: int, choice: _Choice) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish,
        }


class TextWriter(Writer):
    prefix = "cmpl"
    object_whole = "text_completion"
    object_chunk = "text_completion"

    def _shown(self, piece: Piece) -> Piece:
        if self._layout.silent:
            figures = replace(piece.statistics, output_tokens=0)
            finish: FinishReason | None = None if piece.finish is None else "length"
            piece = replace(piece, text="", logprobs=(), finish=finish, statistics=figures)
        if piece.echo is None:
            return piece
        told = (piece.echo.first, *piece.prompt_logprobs) if self._logprobs else ()
        return replace(piece, text=piece.echo.text + piece.text, logprobs=(*told, *piece.logprobs))

    def _chunk_choice(self, index: int, piece: Piece, said: int) -> Json:
        logprobs = _text_logprobs(piece.logprobs, said) if self._logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _whole_choice(self, index: int, choice: _Choice) -> Json:
        logprobs = _text_logprobs(choice.logprobs, 0) if self._logprobs else None
        return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}


def usage(statistics: Sequence[Statistics], per_prompt: int) -> Json:
    """Token counts of one response; `outrider` holds what speculation did.

    statistics: one a choice, `per_prompt` consecutive ones sharing a prompt, which is counted once.
    rejected_prediction_tokens are drafts that were verified and not kept.
    """
    prompts = statistics[::per_prompt]
    prompt = sum(s.prompt_tokens for s in prompts)
    output = sum(s.output_tokens for s in statistics)
    drafted, accepted = sum(s.drafted for s in statistics), sum(s.accepted for s in statistics)
    rounds = sum(s.rounds for s in statistics)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "outrider": {
            "drafted": drafted,
            "accepted": accepted,
            "rounds": rounds,
            "accepted_by_position": _columns(s.accepted_by_position for s in statistics),
            "drafted_by_position": _columns(s.drafted_by_position for s in statistics),
            "preemptions": sum(s.preemptions for s in statistics),
            "by_source": _sources(count for s in statistics for count in s.by_source),
            "rule": ", ".join(dict.fromkeys(s.rule for s in statistics)),
            "lossy": any(s.lossy for s in statistics),
            "failovers": sum(s.failovers for s in statistics),
        },
    }


def _sources(counts: Iterable[SourceCount]) -> Json:
    total: dict[str, dict[str, int]] = {}
    for count in counts:
        entry = total.setdefault(count.source, {"drafted": 0, "accepted": 0})
        entry["drafted"] += count.drafted
        entry["accepted"] += count.accepted
    return total


def _columns(rows: Iterable[Sequence[int]]) -> list[int]:
    total: list[int] = []
    for row in rows:
        total.extend([0] * (len(row) - len(total)))
        for i, value in enumerate(row):
            total[i] += value
    return total


def _chat_logprobs(entries: Sequence[Spelled]) -> Json:
    def spell(entry: Spelled) -> Json:
        return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.data)}

    return {
        "content": [
            spell(entry) | {"top_logprobs": [spell(other) for other in entry.top], "rank": entry.rank}
            for entry in entries
        ],
        "refusal": None,
    }


def _prompt_logprob(entry: Spelled) -> Json:
    """By token id; the prompt's own token comes first."""
    return {
        str(one.token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.text}
        for one in (entry, *entry.top)
    }


def _alternatives(entry: Spelled) -> Json:
    """Likeliest first; of those that read the same, the likeliest."""
    told: Json = {}
    for one in (*entry.top, entry):
        told.setdefault(one.text, one.logprob)
    return told


def _text_logprobs(entries: Sequence[Spelled], offset: int) -> Json:
    """The token itself is among its alternatives, likely or not; the first of a text has none."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [None if entry.logprob is None else _alternatives(entry) for entry in entries],
        "text_offset": offsets,
    }
