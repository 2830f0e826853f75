"""The suffix trie in plain dictionaries: a node for every run of tokens.

Knows: what the words "occurs" and "most frequent successor" mean; the compiled trie is held to it.
Refuses to know: memory. It takes kilobytes a token, and serves where there is no compiler.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.draft.suffix.trie import Draft, Limits, Sizes, Wish
from cluster.errors import BrokenInvariant

#: A node with its dictionary, in bytes, about.
_NODE_BYTES = 250


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens: how often it occurs, and what followed it, the newest passage last."""

    count: int = 0
    children: dict[int, _Node] = field(default_factory=dict)

    def ranked(self) -> list[tuple[int, _Node]]:
        """Successors, the most frequent first, the newer of equals first."""
        return sorted(reversed(self.children.items()), key=lambda item: -item[1].count)


@dataclass(slots=True)
class _Sequence:
    key: int
    tokens: deque[int] = field(default_factory=deque)


class PlainTrie:
    """See `Trie`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._roots: dict[int, _Node] = {}
        self._sequences: deque[_Sequence] = deque()
        self._entering: _Sequence | None = None
        self._cursors: deque[_Node] = deque(maxlen=limits.depth)
        self._tokens = 0
        self._nodes = 0

    def start(self, key: int) -> None:
        if self._entering is not None:
            raise BrokenInvariant("a sequence is entering already")
        while len(self._sequences) >= self._limits.sequences:
            self._drop()
        self._roots.setdefault(key, _Node())
        self._entering = _Sequence(key)
        self._sequences.append(self._entering)

    def append(self, tokens: Sequence[int]) -> None:
        if self._entering is None:
            raise BrokenInvariant("no sequence is entering")
        for token in tokens:
            if self._tokens == self._limits.tokens:
                self._evict()
            self._entering.tokens.append(token)
            self._tokens += 1
            # A cursor of full depth falls out as the new one comes in.
            self._cursors.append(self._roots[self._entering.key])
            self._cursors = deque((self._step(node, token) for node in self._cursors), self._limits.depth)

    def stop(self) -> None:
        if self._entering is None:
            raise BrokenInvariant("no sequence is entering")
        sequence, self._entering = self._entering, None
        self._cursors.clear()
        if not sequence.tokens:
            self._sequences.pop()
            self._forget_empty(sequence.key)

    def speculate(self, key: int, context: Sequence[int], wish: Wish) -> Draft:
        best = Draft()
        for match in range(1, min(len(context), self._limits.depth - 1) + 1):
            node = self._find(key, context[-match:])
            if node is None or best.score >= wish.limit:  # what is certain and of full length stays so
                break
            limit = wish.after(match)
            draft = (
                _grow(node, limit, wish.min_prob, match) if wish.mode == "tree" else _follow(node, limit, wish, match)
            )
            if draft.tokens and draft.score >= best.score:
                best = draft
        return best

    def count(self, key: int, run: Sequence[int]) -> int:
        node = self._find(key, run)
        return node.count if node is not None else 0

    def holds(self, key: int) -> bool:
        return key in self._roots

    @property
    def sizes(self) -> Sizes:
        return Sizes(self._tokens, len(self._sequences), len(self._roots), self._nodes, self._nodes * _NODE_BYTES)

    def close(self) -> None:
        self._roots.clear()
        self._sequences.clear()

    def _step(self, node: _Node, token: int) -> _Node:
        child = node.children.pop(token, None)
        if child is None:
            child = _Node()
            self._nodes += 1
        node.children[token] = child
        child.count += 1
        return child

    def _find(self, key: int, run: Sequence[int]) -> _Node | None:
        node = self._roots.get(key)
        for token in run:
            node = node.children.get(token) if node is not None else None
        return node

    def _drop(self) -> None:
        count = len(self._sequences)
        while len(self._sequences) == count:
            self._evict()

    def _evict(self) -> None:
        """The oldest token leaves, and with it the runs that start there."""
        sequence = self._sequences[0]
        node = self._roots[sequence.key]
        length = min(len(sequence.tokens), self._limits.depth)
        for depth, token in enumerate([sequence.tokens[at] for at in range(length)]):
            child = node.children[token]
            child.count -= 1
            if child.count == 0:
                del node.children[token]
                self._nodes -= length - depth  # nor does anything below it occur
                break
            node = child
        sequence.tokens.popleft()
        self._tokens -= 1
        if not sequence.tokens and sequence is not self._entering:
            self._sequences.popleft()
            self._forget_empty(sequence.key)

    def _forget_empty(self, key: int) -> None:
        if not self._roots[key].children and (self._entering is None or self._entering.key != key):
            del self._roots[key]


def _follow(node: _Node, limit: int, wish: Wish, match: int) -> Draft:
    tokens: list[int] = []
    probs: list[float] = []
    prob = 1.0
    while len(tokens) < limit and node.children:
        token, child = node.ranked()[0]
        prob *= child.count / node.count
        if prob < wish.min_prob:
            break
        tokens.append(token)
        probs.append(prob)
        node = child
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(probs), _sum(probs), match)


def _grow(node: _Node, limit: int, min_prob: float, match: int) -> Draft:
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    heap: list[tuple[float, int, int, int, _Node]] = []  # -prob, order of birth, parent, token, node
    born, prob = 0, 1.0
    while len(tokens) < limit:
        parent = len(tokens) - 1
        for token, child in node.ranked():
            then = prob * (child.count / node.count)
            if then >= min_prob:
                heapq.heappush(heap, (-then, born, parent, token, child))
                born += 1
        if not heap:
            break
        negative, _, above, token, node = heapq.heappop(heap)
        prob = -negative
        tokens.append(token)
        parents.append(above)
        probs.append(prob)
    return Draft(tuple(tokens), tuple(parents), tuple(probs), _sum(probs), match)


def _sum(probs: Sequence[float]) -> float:
    """In order: `sum` compensates in newer Pythons and would then differ from the compiled trie."""
    total = 0.0
    for prob in probs:
        total += prob
    return total
