"""Block ids: who holds which, which may be reused, and which contents are known by key.

Knows: ids, reference counts, content keys and the order of eviction.
Refuses to know: tensors, sequences, tokens, devices.

A block is in exactly one of three states:

    free     no contents worth keeping
    owned    referenced by one or more sequences
    cached   referenced by nobody, contents known by key; evicted oldest first

and free + cached + owned = total, always (law 1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.errors import BrokenInvariant


@dataclass(frozen=True, slots=True)
class BlockCounts:
    total: int
    free: int
    cached: int
    owned: int


class BlockPool:
    """The ledger of one arena. Not thread-safe: one engine, one pool."""

    def __init__(self, num_blocks: int) -> None:
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        total = len(self._refs)
        return BlockCounts(total, len(self._free), len(self._cached), total - self.available)

    def find(self, key: bytes) -> int | None:
        """The block that holds the contents named by `key`, if any; takes no reference."""
        return self._block_of.get(key)

    def is_cached(self, block: int) -> bool:
        """True when nobody references the block, so that taking it costs an available one."""
        return block in self._cached

    def is_sole(self, block: int) -> bool:
        """True when one sequence alone references the block."""
        return self._refs[block] == 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each and no key, or None and no change."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def share(self, block: int) -> None:
        """One more reference to a block found by key."""
        if self._refs[block] == 0:
            if block not in self._cached:
                raise BrokenInvariant(f"block {block} shared while free: its contents are not known")
            del self._cached[block]
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give back one reference each, last block first: a child is evicted before its parent."""
        for block in reversed(list(blocks)):
            if self._refs[block] <= 0:
                raise BrokenInvariant(f"block {block} released more often than taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Name the contents of an owned block. The first block with a key keeps it."""
        if self._refs[block] <= 0:
            raise BrokenInvariant(f"block {block} published while nobody owns it")
        if self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def drop_cached(self) -> None:
        """Forget every cached block's contents."""
        while self._cached:
            self._free.append(self._evict())

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise BrokenInvariant unless the ledger agrees with itself and with `tables`."""
        wanted = [0] * len(self._refs)
        for table in tables:
            for block in table:
                wanted[block] += 1
        if wanted != self._refs:
            raise BrokenInvariant("reference counts disagree with the block tables")
        unowned = sorted([*self._free, *self._cached])
        if unowned != [block for block, refs in enumerate(self._refs) if refs == 0]:
            raise BrokenInvariant("free + cached + owned blocks do not make up the total")
        if any(self._key_of[block] is not None for block in self._free):
            raise BrokenInvariant("a free block still has a key")
        if any(self._key_of[block] != key for key, block in self._block_of.items()):
            raise BrokenInvariant("the key index disagrees with the blocks")

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._refs[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of[block]
        if key is None:
            raise BrokenInvariant(f"cached block {block} has no key")
        del self._block_of[key]
        self._key_of[block] = None
        return block
