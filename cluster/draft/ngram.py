"""Prompt lookup: what followed the newest tokens the last time they occurred here?

Knows: the tokens of each open sequence, indexed by their n-grams.
Refuses to know: models, sampling, other sequences. The guess is a point mass.

Source: prompt lookup decoding (algorithms of the field call it n-gram speculation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cluster.messages import Knobs, Offer, SequenceView, Verdict


@dataclass(slots=True)
class _Index:
    """For each n, where the continuation of each n-gram's latest occurrence starts."""

    starts: dict[int, dict[tuple[int, ...], int]]
    indexed: int = 0  # tokens whose n-grams have a known continuation


class NgramProposer:
    """Tries the longest match first, from max_match down to min_match tokens."""

    name: ClassVar[str] = "ngram"
    samples: ClassVar[bool] = False

    def __init__(self, max_match: int, min_match: int) -> None:
        self._sizes = range(max_match, min_match - 1, -1)
        self._indices: dict[int, _Index] = {}

    def open(self, view: SequenceView) -> None:
        self._indices[view.id] = _Index({size: {} for size in self._sizes})

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:  # noqa: ARG002 - views carry k
        offers = []
        for view in views:
            tokens = self._continue(view)
            if tokens:
                offers.append(Offer(view.id, len(view.tokens), tokens, source=self.name))
        return offers

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing to learn: the next view shows the tokens."""

    def close(self, sequence: int) -> None:
        self._indices.pop(sequence, None)

    def _continue(self, view: SequenceView) -> tuple[int, ...]:
        index = self._indices[view.id]
        tokens = view.tokens
        self._extend(index, tokens)
        for size in self._sizes:
            if size < len(tokens):
                start = index.starts[size].get(tuple(tokens[-size:]))
                if start is not None:
                    return _copy(tokens, start, view.k)
        return ()

    def _extend(self, index: _Index, tokens: Sequence[int]) -> None:
        """Index every n-gram that ends before the last token: only those have a continuation."""
        for end in range(index.indexed + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    index.starts[size][tuple(tokens[end - size : end])] = end
        index.indexed = max(index.indexed, len(tokens) - 1)


def _copy(tokens: Sequence[int], start: int, k: int) -> tuple[int, ...]:
    """k tokens from `start` on; past the end the copy reads itself, so a loop goes on looping."""
    copied: list[int] = []
    for offset in range(k):
        at = start + offset
        copied.append(tokens[at] if at < len(tokens) else copied[at - len(tokens)])
    return tuple(copied)
