"""Draft trees as arithmetic: which node follows which, how deep it lies, what it may see.

Knows: trees given as `parents`: node i follows node parents[i] < i, or the last known token where that is -1.
Refuses to know: where trees come from and what becomes of them.

A node's depth is 1 where it follows the last known token; the position of its token is that token's
plus the depth. A chain is the tree in which every node follows the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Most nodes of a tree: what a node may see of its tree is one machine word, a bit a node.
LARGEST = 64


def sound(parents: Sequence[int]) -> bool:
    """Whether every node follows an earlier one or the last known token, and there are not too many."""
    return len(parents) <= LARGEST and all(-1 <= parent < node for node, parent in enumerate(parents))


def depths(parents: Sequence[int]) -> list[int]:
    """How deep each node lies."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def sights(parents: Sequence[int]) -> list[int]:
    """What each node sees of its tree: bit j for node j, itself and its ancestors."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append((0 if parent < 0 else found[parent]) | 1 << node)
    return found


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from the first after the known ones down to each node, its own included."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def first_path(parents: Sequence[int]) -> list[int]:
    """Nodes of the chain that takes the first child everywhere: the best, where the likelier come first."""
    path: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return path


def kept(parents: Sequence[int], nodes: int, depth: int) -> list[int]:
    """The first `nodes` nodes that lie no deeper than `depth`."""
    return [node for node, deep in enumerate(depths(parents)) if deep <= depth][:nodes]


def renumbered(parents: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    """Parents among `nodes` alone, in their order, in which each comes after its own parent."""
    place = {-1: -1, **{node: at for at, node in enumerate(nodes)}}
    return tuple(place[parents[node]] for node in nodes)


def is_chain(parents: Sequence[int]) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(parents))


def reached(tokens: Sequence[int], parents: Sequence[int], said: Sequence[int]) -> tuple[int, bool]:
    """How many of the tokens `said` a tree foretold, and whether it had something else to say next."""
    at, count = -1, 0
    while True:
        children = [node for node, parent in enumerate(parents[: len(tokens)]) if parent == at]
        hit = next((node for node in children if count < len(said) and tokens[node] == said[count]), None)
        if hit is None:
            return count, bool(children) and count < len(said)
        at, count = hit, count + 1
