"""What a suffix trie is asked, what it answers, and which of the two there are is used.

Knows: the verbs, and how much a trie may hold.
Refuses to know: requests and proposers.

Source: SuffixDecoding (Oliaro et al., NeurIPS 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from cluster.errors import BrokenInvariant

Mode = Literal["path", "tree"]

#: Memory a token takes in the plain twin over what it takes in the compiled trie, about (benchmarks/suffix.py).
PLAIN_COST = 200


@dataclass(frozen=True, slots=True)
class Limits:
    """Runs of at most `depth` tokens are known, of the newest `tokens` tokens and `sequences` sequences."""

    depth: int = 64
    tokens: int = 1_000_000
    sequences: int = 10_000

    def __post_init__(self) -> None:
        if not (2 <= self.depth <= 200 and 2 * self.depth <= self.tokens <= 2**28 and self.sequences >= 1):
            raise BrokenInvariant(f"{self}: depth 2 to 200, tokens 2 * depth to 2**28, one sequence or more")

    @property
    def plain(self) -> Limits:
        """What the plain twin may hold in about the same memory."""
        return replace(self, tokens=max(2 * self.depth, self.tokens // PLAIN_COST))


@dataclass(frozen=True, slots=True)
class Wish:
    """How to continue: after a match of m tokens, at most min(limit, factor * m + offset) more.

    path: the most frequent successor of each token. tree: the likeliest nodes, each after its parent.
    Nodes whose estimated probability is below `min_prob` are left out.
    """

    limit: int
    factor: float = 1.0
    offset: float = 0.0
    min_prob: float = 0.1
    mode: Mode = "path"

    def after(self, match: int) -> int:
        """Most tokens to draft after a match of `match` tokens."""
        return max(0, int(min(self.limit, self.factor * match + self.offset)))


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens guessed: nodes of a tree in an order that puts parents first; -1 is the last known token.

    probs: each node's estimated probability of being accepted; `score`, their sum, is how many
    tokens are expected to be. match: how many known tokens it continues.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()
    score: float = 0.0
    match: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a trie holds; bytes are measured for the compiled trie, estimated for the plain one."""

    tokens: int
    sequences: int
    keys: int
    nodes: int
    bytes: int


class Trie(Protocol):
    """Texts under keys; a question sees the texts of one key.

    One sequence enters at a time. The oldest tokens leave when there are more than Limits.tokens,
    the oldest sequences when there are more than Limits.sequences. Equally frequent successors:
    the one seen last counts as more frequent.
    """

    def start(self, key: int) -> None:
        """A sequence begins under `key`. Raises BrokenInvariant if one is entering."""

    def append(self, tokens: Sequence[int]) -> None:
        """The sequence goes on; tokens are int32. Raises BrokenInvariant if none is entering."""

    def stop(self) -> None:
        """The sequence is over: it may leave in its turn."""

    def speculate(self, key: int, context: Sequence[int], wish: Wish) -> Draft:
        """The best continuation of a suffix of `context`: of equals the longer, up to one sure of all its tokens."""

    def count(self, key: int, run: Sequence[int]) -> int:
        """How often `run`, at most `depth` tokens, occurs under `key`."""

    def holds(self, key: int) -> bool:
        """Whether anything is known under `key`."""

    @property
    def sizes(self) -> Sizes: ...

    def close(self) -> None:
        """Give the memory back; the trie is not used afterwards."""
