"""Where an answer ends: one token at a time, however many a step brought.

Knows: end tokens, stop strings, the length limit, and the text shown so far.
Refuses to know: drafts, laws, logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.request import FinishReason, Sampling
from cluster.text.stop import StopStrings
from cluster.text.stream import TextStream


@dataclass(frozen=True, slots=True)
class Cut:
    """The first `kept` tokens stand; `text` may be shown now."""

    kept: int
    text: str
    finish: FinishReason | None


class Ending:
    """Watches one answer. `stream` None: token ids only, stop strings cannot match."""

    def __init__(self, sampling: Sampling, eos_ids: frozenset[int], stream: TextStream | None) -> None:
        self._sampling = sampling
        self._ends = sampling.ends(eos_ids)
        self._stream = stream
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop)
        self._emitted = 0

    def cut(self, tokens: Sequence[int]) -> Cut:
        """Take tokens in order until the answer ends."""
        shown: list[str] = []
        for kept, token in enumerate(tokens, start=1):
            self._emitted += 1
            finish = self._step(token, shown)
            if finish is not None:
                if not self._stops.stopped:
                    tail = self._stream.finish() if self._stream is not None else ""
                    shown.append(self._stops.push(tail) + self._stops.finish())
                return Cut(kept, "".join(shown), finish)
        return Cut(len(tokens), "".join(shown), None)

    def _step(self, token: int, shown: list[str]) -> FinishReason | None:
        counts = self._emitted > self._sampling.min_tokens  # whether this token may end the answer
        ends = counts and token in self._ends
        if self._stream is not None and (not ends or self._sampling.include_stop):
            piece = self._stream.step(token)
            # Text of the first min_tokens tokens is no part of any stop string: what was shown stays shown.
            shown.append(self._stops.push(piece) if counts else piece)
        if ends or self._stops.stopped:
            return "stop"
        return "length" if self._emitted >= self._sampling.max_tokens else None
