"""Suffix decoding: what followed the longest frequent match, in this request or in answers given before.

Knows: a trie of each open request's own text, and one of past answers, apart by salt.
Refuses to know: models and sampling. A guess depends on tokens already known alone: a point mass.

What it may remember is bounded by its limits, whatever comes, stops or is aborted; the oldest
answer of any salt leaves first. Source: SuffixDecoding (Oliaro et al., NeurIPS 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from cluster.draft.suffix.native import TrieMaker
from cluster.draft.suffix.trie import Draft, Limits, Sizes, Trie, Wish
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.tree import is_chain, kept, renumbered

#: A trie of one request holds one text: its key says nothing.
_OWN = 0


@dataclass(slots=True)
class _Open:
    """A live request: its answer so far and, once somebody asked, the trie of its text."""

    salt: str
    answer: list[int] = field(default_factory=list)
    trie: Trie | None = None
    entered: int = 0


class SuffixProposer:
    """The better of two drafts for each row: from the request itself, from past answers under its salt.

    A wish for trees is fulfilled where the step has room for more nodes than a chain would fill.
    """

    name: ClassVar[str] = "suffix"
    samples: ClassVar[bool] = False

    def __init__(self, wish: Wish, past: Limits, own: Limits) -> None:
        self._wish = wish
        self._own = own
        self._depth = own.depth
        self._maker = TrieMaker()
        self._past = self._maker.make(past)
        self._open: dict[int, _Open] = {}
        self._keys: dict[str, int] = {}  # of the salts the past knows
        self._next_key = 0

    @property
    def native(self) -> bool:
        """Whether the tries are compiled; the plain ones hold less and take longer."""
        return self._maker.native

    @property
    def sizes(self) -> Sizes:
        """What is remembered of the past."""
        return self._past.sizes

    def open(self, view: SequenceView) -> None:
        self._release(view.id)
        self._open[view.id] = _Open(view.salt, list(view.tokens[view.prompt_len :]))

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:  # noqa: ARG002 - views carry k
        offers = []
        for view in views:
            draft = self._draft(view)
            nodes = kept(draft.parents, len(draft.tokens), view.k)
            if nodes:
                tokens, parents = tuple(draft.tokens[node] for node in nodes), renumbered(draft.parents, nodes)
                tree = None if is_chain(parents) else parents
                offers.append(Offer(view.id, len(view.tokens), tokens, source=self.name, parents=tree))
        return offers

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            state = self._open.get(verdict.sequence)
            if state is not None:
                state.answer.extend(verdict.tokens)

    def close(self, sequence: int) -> None:
        """The request is over; its answer, however it ended, is remembered under its salt."""
        state = self._release(sequence)
        if state is not None and state.answer:
            self._past.start(self._key(state.salt))
            self._past.append(state.answer)
            self._past.stop()
            if len(self._keys) > self._past.sizes.keys:
                self._keys = {salt: key for salt, key in self._keys.items() if self._past.holds(key)}

    def _draft(self, view: SequenceView) -> Draft:
        tree = self._wish.mode == "tree" and view.nodes > view.k
        limit = min(self._wish.limit, view.nodes if tree else view.k)
        wish = replace(self._wish, limit=limit, mode="tree" if tree else "path")
        if wish.limit < 1:
            return Draft()
        context = view.tokens[-self._depth :]
        own = self._catch_up(view).speculate(_OWN, context, wish)
        key = self._keys.get(view.salt)
        past = self._past.speculate(key, context, wish) if key is not None else Draft()
        return past if past.score > own.score else own

    def _catch_up(self, view: SequenceView) -> Trie:
        """The trie of the request's own text, brought up to its newest token."""
        state = self._open[view.id]
        if state.trie is None:
            state.trie = self._maker.make(self._own)
            state.trie.start(_OWN)
        state.trie.append(view.tokens[state.entered :])
        state.entered = len(view.tokens)
        return state.trie

    def _release(self, sequence: int) -> _Open | None:
        state = self._open.pop(sequence, None)
        if state is not None and state.trie is not None:
            state.trie.close()
        return state

    def _key(self, salt: str) -> int:
        if salt not in self._keys:
            self._keys[salt] = self._next_key
            self._next_key += 1
        return self._keys[salt]
