"""A draft tree being grown level by level from a model's own laws.

Knows: how likely each path is in the drafter's eyes, which nodes are worth going on from, which are offered.
Refuses to know: models, caches, noise and processors: scores of tokens arrive from outside.

At every level the likeliest nodes get children; in the end the likeliest nodes of all are offered. A
child is never likelier than its parent, so those make a tree. Source: EAGLE-2, arXiv 2406.16858. Which nodes
these are follows from the known tokens alone: every node is a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.messages import Offer, PlanRow, SequenceView
from cluster.model.history import History
from cluster.request import Sampling
from cluster.tree import LARGEST, is_chain, paths, renumbered


@dataclass(frozen=True, slots=True)
class Branching:
    """Children of a node, and nodes of a level that get any; most nodes offered; most levels."""

    width: int = 4
    nodes: int = LARGEST
    depth: int = 8


@dataclass(slots=True)
class Growth:
    """One row's tree. `most` nodes are offered, `depth` levels grown.

    scores: log-probability of each path; `front`: nodes that get children next, -1 the last known token;
    `computed`: nodes whose keys and values are in the drafter's cache, in the order of their slots.
    """

    view: SequenceView
    sampling: Sampling  # the drafter's own
    history: History | None
    branching: Branching
    depth: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    front: list[int] = field(default_factory=lambda: [-1])
    computed: list[int] = field(default_factory=list)
    level: int = 0

    @property
    def most(self) -> int:
        return min(self.view.nodes, self.branching.nodes)

    @property
    def length(self) -> int:
        """Slots of the drafter's cache that this row fills."""
        return len(self.view.tokens) + len(self.computed)

    def supposed(self) -> list[tuple[int, ...]]:
        """The drafts down to each node in front."""
        down = paths(self.tokens, self.parents)
        return [down[node] if node >= 0 else () for node in self.front]

    def add(self, children: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Children of each node in front, as (token, log-probability after it); go on to the next level."""
        fresh = []
        for node, born in zip(self.front, children, strict=True):
            for token, chance in born:
                fresh.append(len(self.tokens))
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(chance + (self.scores[node] if node >= 0 else 0.0))
        self.level += 1
        self.front = self._worthy(fresh) if self.level < self.depth else []
        self.computed.extend(self.front)

    def _worthy(self, fresh: Sequence[int]) -> list[int]:
        """The likeliest of a level, without those whose children could no more be among the nodes offered."""
        chosen = set(self._chosen())
        best = sorted((node for node in fresh if node in chosen), key=lambda node: -self.scores[node])
        room = LARGEST - len(self.computed)
        return sorted(best[: min(self.branching.width, room)])

    def _chosen(self) -> list[int]:
        """Nodes offered as it stands, likelier ones first; of equals the older, hence no child before its parent."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.scores[node], node))
        return order[: self.most]

    def row(self, blocks: tuple[int, ...]) -> PlanRow:
        """The nodes in front, to be computed behind those computed before."""
        return PlanRow(
            sequence=self.view.id,
            first=self.length - len(self.front),
            tokens=tuple(self.tokens[node] for node in self.front),
            blocks=blocks,
            wants=len(self.front),
            parents=renumbered(self.parents, self.computed),
        )

    def offer(self, source: str) -> Offer:
        chosen = self._chosen()
        parents = renumbered(self.parents, chosen)
        tokens = tuple(self.tokens[node] for node in chosen)
        tree = None if is_chain(parents) else parents
        return Offer(self.view.id, len(self.view.tokens), tokens, source=source, parents=tree)
