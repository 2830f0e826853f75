"""Block tables, shared prefixes and their salts."""

from __future__ import annotations

import pytest

from cluster.errors import BrokenInvariant
from cluster.kv.blocks import BlockPool
from cluster.kv.cache import KVCache
from cluster.kv.keys import KeyContext

BLOCK = 4
PROMPT = tuple(range(10))


def cache(blocks: int = 8, *, prefix: bool = True) -> KVCache:
    return KVCache(BlockPool(blocks), BLOCK, KeyContext("m"), prefix=prefix)


def computed(kv: KVCache, sequence: int, tokens: tuple[int, ...], salt: str = "") -> int:
    """Open, reserve and commit all of `tokens`; returns how many were found."""
    found = kv.open(sequence, tokens, salt)
    assert kv.reserve(sequence, len(tokens))
    kv.commit(sequence, tokens, len(tokens))
    kv.check()
    return found


def test_the_same_prompt_finds_its_full_blocks() -> None:
    kv = cache()
    assert computed(kv, 0, PROMPT) == 0
    assert computed(kv, 1, PROMPT) == 8
    assert kv.table(0)[:2] == kv.table(1)[:2]
    assert kv.table(0)[2] != kv.table(1)[2]


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_hit_is_always_shorter_than_the_tokens(length: int, found: int) -> None:
    kv = cache()
    computed(kv, 0, PROMPT)
    assert kv.open(1, (*PROMPT, 77, 78)[:length], "") == found


@pytest.mark.parametrize("length", [10, 11, 30])
def test_a_fork_holds_what_looking_up_would_find(length: int) -> None:
    kv = cache()
    computed(kv, 0, PROMPT)
    longer = (*PROMPT, *range(100, 100 + length - len(PROMPT)))
    assert kv.fork(1, 0, length) == kv.open(2, longer, "") == 8
    assert kv.table(1) == kv.table(2) == kv.table(0)[:2]
    kv.check()
    kv.release(0)
    kv.release(2)
    assert computed(kv, 3, PROMPT) == 8
    with pytest.raises(BrokenInvariant):
        kv.fork(1, 3, 10)


def test_a_different_block_ends_the_hit() -> None:
    kv = cache()
    computed(kv, 0, PROMPT)
    assert kv.open(1, (0, 1, 2, 3, 9, 9, 9, 9, 8, 9), "") == 4
    assert kv.open(2, (9, *PROMPT[1:]), "") == 0


def test_salts_do_not_see_each_other() -> None:
    kv = cache()
    computed(kv, 0, PROMPT, "tenant")
    assert kv.open(1, PROMPT, "") == 0
    assert kv.open(2, PROMPT, "other") == 0
    assert kv.open(3, PROMPT, "tenant") == 8


def test_prefix_off_finds_and_caches_nothing() -> None:
    kv = cache(prefix=False)
    computed(kv, 0, PROMPT)
    assert kv.open(1, PROMPT, "") == 0
    kv.release(0)
    assert kv.counts.cached == 0


def test_only_computed_tokens_are_published() -> None:
    kv = cache()
    kv.open(0, PROMPT, "")
    kv.reserve(0, 10)
    kv.commit(0, PROMPT, 7)
    assert kv.open(1, PROMPT, "") == 4


def test_surplus_blocks_return_at_commit() -> None:
    kv = cache()
    kv.open(0, PROMPT, "")
    assert kv.reserve(0, 20)
    assert kv.counts.owned == 5
    kv.commit(0, PROMPT, 9)
    assert kv.counts.owned == 3
    assert len(kv.table(0)) == 3
    kv.check()


def test_reserve_is_all_or_nothing() -> None:
    kv = cache(2)
    kv.open(0, PROMPT, "")
    assert kv.reserve(0, 4)
    assert not kv.reserve(0, 12)
    assert len(kv.table(0)) == 1
    assert kv.reserve(0, 8)
    assert kv.reserve(0, 1)  # covered already


def test_opening_twice_is_named() -> None:
    kv = cache()
    kv.open(0, PROMPT, "")
    with pytest.raises(BrokenInvariant, match="already has a block table"):
        kv.open(0, PROMPT, "")


def test_release_is_once_and_unknown_is_ignored() -> None:
    kv = cache()
    computed(kv, 0, PROMPT)
    kv.release(0)
    kv.release(0)
    kv.release(99)
    assert not kv.holds(0)
    assert kv.counts.owned == 0
    assert kv.counts.cached == 2


def test_fits_counts_cached_hits_as_taken() -> None:
    """A hit that nobody holds costs an available block, a hit somebody holds costs none."""
    kv = cache(3)
    computed(kv, 0, PROMPT)
    assert not kv.fits(PROMPT, "")  # two shared, one wanted, none left
    kv.release(0)
    assert kv.fits(PROMPT, "")
    assert not kv.fits(PROMPT, "", spare=1)
    assert kv.fits(PROMPT[:8], "", spare=1)
    assert not kv.fits((*PROMPT, 1, 2, 3), "")


def test_forget_prefixes_makes_the_next_lookup_cold() -> None:
    kv = cache()
    computed(kv, 0, PROMPT)
    kv.release(0)
    kv.forget_prefixes()
    assert kv.open(1, PROMPT, "") == 0
    kv.check()


def test_published_blocks_serve_until_they_are_needed() -> None:
    kv = cache(4)
    computed(kv, 0, PROMPT)
    kv.release(0)
    computed(kv, 1, tuple(range(50, 60)))  # two free blocks and the younger of the two cached
    kv.release(1)
    assert kv.open(2, PROMPT, "") == 4
    kv.check()
