"""Token recycling: after this token, which one came last time?

Knows: for each salt, the tokens last seen after each token, in prompts and verified answers.
Refuses to know: models, sampling, longer contexts (suffix/ does that). The guesses are point masses.

One pair of tokens is the shortest memory there is: it answers when nothing longer ever matched,
and a table of a vocabulary's size is all it can grow to. Source: Token Recycling, arXiv
2408.08696, which keeps the target's own top-8 of every position; only verified tokens are seen here,
and of a token's successors the newer counts as likelier.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from cluster.messages import Knobs, Offer, SequenceView, Verdict

#: The chance taken for the newest successor; that of each older one is the same share of what is left.
_NEWEST = 0.5


@dataclass(slots=True)
class _Reader:
    """How far a sequence has been read, and its newest token read."""

    salt: str
    seen: int
    last: int


class RecyclingProposer:
    """Follows last-seen successors from the newest token; at most max_pairs are kept, all salts together.

    successors: how many of a token are remembered; with one, every draft is a chain.
    """

    name: ClassVar[str] = "recycling"
    samples: ClassVar[bool] = False

    def __init__(self, max_pairs: int, successors: int = 1) -> None:
        self._max_pairs = max_pairs
        self._successors = successors
        self._pairs = 0
        self._tables: OrderedDict[str, dict[int, tuple[int, ...]]] = OrderedDict()  # salts, least recently fed first
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
            tokens, parents = self._draft(view)
            if tokens:
                offers.append(Offer(view.id, len(view.tokens), tokens, source=self.name, parents=parents))
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
            known = table.pop(token, ())  # popped first, so that a table's oldest entry is its first
            table[token] = (successor, *(other for other in known if other != successor))[: self._successors]
            self._pairs += len(table[token]) - len(known)
        while self._pairs > self._max_pairs:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        salt, table = next(iter(self._tables.items()))
        if len(self._tables) == 1:
            self._pairs -= len(table.pop(next(iter(table))))
        else:
            del self._tables[salt]
            self._pairs -= sum(map(len, table.values()))

    def _draft(self, view: SequenceView) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Tokens, and their parents where they are a tree."""
        table = self._tables.get(view.salt, {})
        if self._successors > 1 and view.nodes > view.k:
            return _tree(table, view.tokens[-1], view.nodes, view.k)
        path: list[int] = []
        found = table.get(view.tokens[-1])
        while found and len(path) < view.k:
            path.append(found[0])
            found = table.get(found[0])
        return tuple(path), None


def _tree(
    table: Mapping[int, Sequence[int]], token: int, nodes: int, depth: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The likeliest nodes first, where a successor is likelier the newer it is, and a path less likely the longer."""
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, int]] = []  # -chance, born, parent, depth, token
    born = 0
    here, parent, chance, deep = token, -1, 1.0, 0
    while True:
        for rank, successor in enumerate(table.get(here, ()) if deep < depth else ()):
            born += 1
            heapq.heappush(heap, (-chance * _NEWEST ** (rank + 1), born, parent, deep + 1, successor))
        if not heap or len(tokens) >= nodes:
            return tuple(tokens), tuple(parents)
        negative, _, above, deep, here = heapq.heappop(heap)
        chance, parent = -negative, len(tokens)
        tokens.append(here)
        parents.append(above)
