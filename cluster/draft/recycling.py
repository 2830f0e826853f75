"""Token recycling: after this token, which one came last time?

Knows: for each salt, the token last seen after each token, in prompts and verified answers.
Refuses to know: models, sampling, longer contexts (suffix/ does that). The guess is a point mass.

One pair of tokens is the shortest memory there is: it answers when nothing longer ever matched,
and a table of a vocabulary's size is all it can grow to. Source: Token Recycling, arXiv
2408.08696, which keeps eight successors from the target's own top-8 for a tree; this is its chain:
only verified tokens are seen here, and the newest successor is followed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from cluster.messages import Knobs, Offer, SequenceView, Verdict


@dataclass(slots=True)
class _Reader:
    """How far a sequence has been read, and its newest token read."""

    salt: str
    seen: int
    last: int


class RecyclingProposer:
    """Follows last-seen successors from the newest token; at most max_pairs are kept, all salts together."""

    name: ClassVar[str] = "recycling"
    samples: ClassVar[bool] = False

    def __init__(self, max_pairs: int) -> None:
        self._max_pairs = max_pairs
        self._pairs = 0
        self._tables: OrderedDict[str, dict[int, int]] = OrderedDict()  # salts, least recently fed first
        self._readers: dict[int, _Reader] = {}

    @property
    def pairs(self) -> int:
        """Pairs kept now."""
        return self._pairs

    def open(self, view: SequenceView) -> None:
        self._readers[view.id] = _Reader(view.salt, len(view.tokens), view.tokens[-1])
        self._learn(view.salt, view.tokens)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:  # noqa: ARG002 - views carry k
        offers = []
        for view in views:
            self._catch_up(view)
            tokens = self._follow(view.salt, view.tokens[-1], view.k)
            if tokens:
                offers.append(Offer(view.id, len(view.tokens), tokens, source=self.name))
        return offers

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        """Learn what was emitted at once: an answer's last tokens appear in no later view."""
        for verdict in verdicts:
            reader = self._readers.get(verdict.sequence)
            if reader is not None and verdict.tokens:
                self._learn(reader.salt, (reader.last, *verdict.tokens))
                reader.seen += len(verdict.tokens)
                reader.last = verdict.tokens[-1]

    def close(self, sequence: int) -> None:
        self._readers.pop(sequence, None)

    def _catch_up(self, view: SequenceView) -> None:
        """Read what a lost verdict would have told."""
        reader = self._readers[view.id]
        if reader.seen < len(view.tokens):
            self._learn(view.salt, view.tokens[reader.seen - 1 :])
        reader.seen, reader.last = len(view.tokens), view.tokens[-1]

    def _learn(self, salt: str, tokens: Sequence[int]) -> None:
        table = self._tables.setdefault(salt, {})
        self._tables.move_to_end(salt)
        for token, successor in pairwise(tokens):
            if table.pop(token, None) is None:  # popped first, so that a table's oldest pair is its first
                self._pairs += 1
            table[token] = successor
        while self._pairs > self._max_pairs:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        salt, table = next(iter(self._tables.items()))
        if len(self._tables) == 1:
            del table[next(iter(table))]
            self._pairs -= 1
        else:
            del self._tables[salt]
            self._pairs -= len(table)

    def _follow(self, salt: str, token: int, k: int) -> tuple[int, ...]:
        table = self._tables.get(salt, {})
        path: list[int] = []
        successor = table.get(token)
        while successor is not None and len(path) < k:
            path.append(successor)
            successor = table.get(successor)
        return tuple(path)
