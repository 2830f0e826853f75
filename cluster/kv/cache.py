"""The cache as the scheduler sees it: sequences have block tables, prefixes are found and shared.

Knows: which blocks cover which positions of which sequence, and which prefixes are published.
Refuses to know: tensors, why a sequence needs room, what to do when there is none.

Only committed tokens are ever published: a rejected draft's slots are overwritten or returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.errors import BrokenInvariant
from cluster.kv.blocks import BlockCounts, BlockPool
from cluster.kv.keys import KeyContext, child_key, root_key


@dataclass(slots=True)
class _Table:
    """One sequence's blocks; `keys[i]` names block i, for the published leading ones."""

    blocks: list[int]
    keys: list[bytes]
    root: bytes
    view: tuple[int, ...] | None = field(default=None)


class KVCache:
    """Block tables over one `BlockPool`."""

    def __init__(self, pool: BlockPool, block_tokens: int, context: KeyContext, *, prefix: bool = True) -> None:
        self._pool = pool
        self._context = context
        self._prefix = prefix
        self._tables: dict[int, _Table] = {}
        self.block_tokens = block_tokens

    @property
    def counts(self) -> BlockCounts:
        return self._pool.counts

    def blocks_for(self, length: int) -> int:
        """How many blocks cover `length` tokens."""
        return -(-length // self.block_tokens)

    def shareable(self, length: int) -> int:
        """How many of `length` tokens lie in blocks that sequences of just these tokens can have in common."""
        return (length - 1) // self.block_tokens * self.block_tokens if self._prefix else 0

    def fits(self, sequence_tokens: Sequence[int], salt: str, spare: int = 0, *, match: bool = True) -> bool:
        """Whether a new sequence of these tokens would find room now, leaving `spare` blocks; `match` as in `open`."""
        keys = self._match(sequence_tokens, root_key(self._context, salt)) if match else []
        found = [self._pool.find(key) for key in keys]
        revived = sum(1 for block in found if block is not None and self._pool.is_cached(block))
        fresh = self.blocks_for(len(sequence_tokens)) - len(keys)
        return fresh + revived + spare <= self._pool.available

    def open(self, sequence: int, tokens: Sequence[int], salt: str, *, match: bool = True) -> int:
        """Start a table with the longest published prefix of `tokens`, with none unless `match`; returns its length.

        Always shorter than `tokens`: the last token must be computed for its logits.
        """
        if sequence in self._tables:
            raise BrokenInvariant(f"sequence {sequence} already has a block table")
        root = root_key(self._context, salt)
        keys = self._match(tokens, root) if match else []
        blocks = [block for key in keys if (block := self._pool.find(key)) is not None]
        for block in blocks:
            self._pool.share(block)
        self._tables[sequence] = _Table(blocks, keys, root)
        return len(blocks) * self.block_tokens

    def fork(self, sequence: int, other: int, length: int) -> int:
        """As `open` of `length` tokens, with which all of another sequence's begin: its blocks are not looked up."""
        if sequence in self._tables:
            raise BrokenInvariant(f"sequence {sequence} already has a block table")
        table = self._tables[other]
        shared = min(len(table.keys), (length - 1) // self.block_tokens)
        for block in table.blocks[:shared]:
            self._pool.share(block)
        self._tables[sequence] = _Table(table.blocks[:shared], table.keys[:shared], table.root)
        return shared * self.block_tokens

    def reserve(self, sequence: int, length: int) -> bool:
        """Make the table cover `length` tokens; False, and no change, when blocks are short."""
        table = self._tables[sequence]
        fresh = self._pool.allocate(max(0, self.blocks_for(length) - len(table.blocks)))
        if fresh is None:
            return False
        if fresh:
            table.blocks.extend(fresh)
            table.view = None
        return True

    def table(self, sequence: int) -> tuple[int, ...]:
        table = self._tables[sequence]
        if table.view is None:
            table.view = tuple(table.blocks)
        return table.view

    def commit(self, sequence: int, tokens: Sequence[int], computed_len: int) -> None:
        """Publish the full blocks among the first `computed_len` tokens; return surplus blocks."""
        table = self._tables[sequence]
        if self._prefix:
            for index in range(len(table.keys), computed_len // self.block_tokens):
                start = index * self.block_tokens
                parent = table.keys[-1] if table.keys else table.root
                key = child_key(parent, tokens[start : start + self.block_tokens])
                self._pool.publish(table.blocks[index], key)
                table.keys.append(key)
        keep = self.blocks_for(computed_len)
        if keep < len(table.blocks):
            self._pool.release(table.blocks[keep:])
            del table.blocks[keep:]
            table.view = None

    def release(self, sequence: int) -> None:
        """Give back every block of a sequence. Unknown sequences are ignored."""
        table = self._tables.pop(sequence, None)
        if table is not None:
            self._pool.release(table.blocks)

    def held_alone(self, sequence: int) -> int:
        """How many blocks nobody else holds: so many more could be taken if the sequence gave its own back."""
        return sum(self._pool.is_sole(block) for block in self._tables[sequence].blocks)

    def holds(self, sequence: int) -> bool:
        return sequence in self._tables

    def forget_prefixes(self) -> None:
        """Drop every cached block: the next lookup finds nothing that no sequence holds."""
        self._pool.drop_cached()

    def check(self) -> None:
        """Raise BrokenInvariant unless law 1 holds."""
        self._pool.check(table.blocks for table in self._tables.values())

    def _match(self, tokens: Sequence[int], root: bytes) -> list[bytes]:
        """Keys of the published leading blocks of `tokens`, the last token left out."""
        keys: list[bytes] = []
        if not self._prefix:
            return keys
        parent = root
        for index in range((len(tokens) - 1) // self.block_tokens):
            start = index * self.block_tokens
            parent = child_key(parent, tokens[start : start + self.block_tokens])
            if self._pool.find(parent) is None:
                break
            keys.append(parent)
        return keys
