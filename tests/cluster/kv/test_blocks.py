"""The ledger of block ids."""

from __future__ import annotations

import pytest

from cluster.errors import BrokenInvariant
from cluster.kv.blocks import BlockCounts, BlockPool


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_every_block_is_free_owned_or_cached() -> None:
    pool = BlockPool(4)
    first, second, third = taken(pool, 3)
    pool.publish(first, b"one")
    pool.release([first, second])
    assert pool.counts == BlockCounts(total=4, free=2, cached=1, owned=1)
    pool.check([[third]])


def test_too_many_is_none_and_changes_nothing() -> None:
    pool = BlockPool(2)
    assert pool.allocate(3) is None
    assert pool.counts.free == 2
    assert pool.allocate(0) == []


def test_double_release_is_named() -> None:
    pool = BlockPool(2)
    (block,) = taken(pool, 1)
    pool.release([block])
    with pytest.raises(BrokenInvariant, match=f"block {block} released more often than taken"):
        pool.release([block])


def test_publishing_what_nobody_owns_is_named() -> None:
    with pytest.raises(BrokenInvariant, match="nobody owns"):
        BlockPool(1).publish(0, b"key")


def test_sharing_a_free_block_is_named() -> None:
    with pytest.raises(BrokenInvariant, match="while free"):
        BlockPool(1).share(0)


def test_a_shared_block_outlives_its_first_owner() -> None:
    pool = BlockPool(2)
    (block,) = taken(pool, 1)
    pool.publish(block, b"key")
    pool.share(block)
    pool.release([block])
    assert pool.counts.owned == 1
    pool.release([block])
    assert pool.counts.cached == 1
    assert pool.find(b"key") == block


def test_the_first_block_with_a_key_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = taken(pool, 2)
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    pool.publish(first, b"another")  # and a block keeps its first name
    assert pool.find(b"key") == first
    assert pool.find(b"another") is None
    pool.release([first, second])
    assert pool.counts == BlockCounts(total=2, free=1, cached=1, owned=0)


def test_free_blocks_go_first_then_the_longest_unused() -> None:
    pool = BlockPool(3)
    blocks = taken(pool, 3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.release([blocks[2]])
    pool.share(blocks[1])  # used again: now the youngest
    pool.release([blocks[1]])
    left = []
    for _ in range(3):
        taken(pool, 1)
        left.append([key for key in (b"a", b"b", b"c") if pool.find(key) is not None])
    assert left == [[b"b", b"c"], [b"b"], []]


def test_a_child_is_evicted_before_its_parent() -> None:
    pool = BlockPool(2)
    parent, child = taken(pool, 2)
    pool.publish(parent, b"parent")
    pool.publish(child, b"child")
    pool.release([parent, child])
    taken(pool, 1)
    assert pool.find(b"parent") is not None
    assert pool.find(b"child") is None


def test_an_evicted_key_finds_nothing_and_its_block_is_nameless() -> None:
    pool = BlockPool(1)
    (block,) = taken(pool, 1)
    pool.publish(block, b"old")
    pool.release([block])
    assert taken(pool, 1) == [block]
    assert pool.find(b"old") is None
    pool.publish(block, b"new")
    assert pool.find(b"new") == block


def test_drop_cached_keeps_what_is_owned() -> None:
    pool = BlockPool(2)
    first, second = taken(pool, 2)
    pool.publish(first, b"a")
    pool.publish(second, b"b")
    pool.release([first])
    pool.drop_cached()
    assert pool.find(b"a") is None
    assert pool.find(b"b") == second
    pool.check([[second]])


@pytest.mark.parametrize("tables", [[], [[0, 0]], [[1]]])
def test_check_compares_with_the_tables(tables: list[list[int]]) -> None:
    pool = BlockPool(2)
    assert taken(pool, 1) == [0]
    pool.check([[0]])
    with pytest.raises(BrokenInvariant, match="reference counts"):
        pool.check(tables)


def test_check_sees_a_block_that_is_in_no_list() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(BrokenInvariant, match="do not make up the total"):
        pool.check([])
