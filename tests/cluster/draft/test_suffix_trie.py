"""The compiled suffix trie against the plain one: the same counts and drafts, whatever enters and leaves."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.draft.suffix.native import NativeTrie, TrieMaker
from cluster.draft.suffix.plain import PlainTrie
from cluster.draft.suffix.trie import PLAIN_COST, Limits, Trie, Wish
from cluster.errors import BrokenInvariant

MAKER = TrieMaker()
ROOMY = Limits(8, 100, 10)


def same(native: Trie, plain: Trie, context: Sequence[int], wish: Wish, keys: Sequence[int] = (0, 1, 2)) -> None:
    for key in keys:
        assert native.speculate(key, context, wish) == plain.speculate(key, context, wish)
        assert native.holds(key) == plain.holds(key)
        for size in range(1, 1 + min(8, len(context))):
            assert native.count(key, context[-size:]) == plain.count(key, context[-size:])
    ours, theirs = native.sizes, plain.sizes
    assert (ours.tokens, ours.sequences, ours.keys) == (theirs.tokens, theirs.sequences, theirs.keys)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Limits, list[tuple[int, list[int]]]]:
    """Small limits, so that eviction, the depth bound and repeats happen all the time."""
    depth = draw(st.integers(2, 8))
    limits = Limits(depth, draw(st.integers(2 * depth, 60)), draw(st.integers(1, 4)))
    token = st.integers(0, draw(st.integers(0, 8)))
    text = st.builds(lambda unit, times: unit * times, st.lists(token, max_size=12), st.integers(1, 4))
    return limits, draw(st.lists(st.tuples(st.integers(0, 2), text), min_size=1, max_size=8))


WISHES = st.builds(
    Wish,
    limit=st.integers(1, 10),
    factor=st.sampled_from((0.5, 1.0, 2.0)),
    offset=st.sampled_from((-1.0, 0.0, 3.0)),
    min_prob=st.sampled_from((0.0, 0.1, 0.4)),
    mode=st.sampled_from(("path", "tree")),
)


@given(schedules(), WISHES)
@settings(max_examples=150, deadline=None)
def test_both_tries_agree_at_every_moment(schedule: tuple[Limits, list[tuple[int, list[int]]]], wish: Wish) -> None:
    limits, texts = schedule
    native, plain = MAKER.make(limits), PlainTrie(limits)
    for key, text in texts:
        native.start(key)
        plain.start(key)
        for at in range(len(text)):
            native.append(text[at : at + 1])
            plain.append(text[at : at + 1])
            same(native, plain, text[max(0, at - limits.depth + 1) : at + 1], wish)
        native.stop()
        plain.stop()
        same(native, plain, [*range(limits.depth)], wish)


@pytest.mark.parametrize("letters", [2, 3, 30, 400])
def test_long_texts_agree(letters: int) -> None:
    """Tables of children, free nodes and the ring all get to grow and to be used again."""
    rng = random.Random(letters)
    limits = Limits(depth=16, tokens=1500, sequences=40)
    native, plain = MAKER.make(limits), PlainTrie(limits)
    for _ in range(60):
        key = rng.randrange(3)
        text = [min(rng.randrange(letters), rng.randrange(letters)) for _ in range(rng.randrange(250))]
        text[len(text) // 2 :] = text[: rng.randrange(1 + len(text))]
        for trie in (native, plain):
            trie.start(key)
            trie.append(text)
        wish = Wish(12, 1.0, 2.0, 0.02, rng.choice(("path", "tree")))
        for end in range(1, len(text), 17):
            same(native, plain, text[:end][-20:], wish, keys=(key,))
        for trie in (native, plain):
            trie.stop()
    assert plain.sizes.tokens <= 1500


def test_nothing_is_left_when_everything_is_evicted() -> None:
    limits = Limits(depth=8, tokens=64, sequences=1)
    trie = MAKER.make(limits)
    for key in range(200):
        trie.start(key)
        trie.append([(key * at) % 7 for at in range(64)])
        trie.stop()
        assert trie.sizes.keys == 1
    trie.start(1000)
    trie.stop()
    sizes = trie.sizes
    assert (sizes.tokens, sizes.sequences, sizes.keys, sizes.nodes) == (0, 0, 0, 0)


@pytest.mark.parametrize("make", [MAKER.make, PlainTrie], ids=["native", "plain"])
class TestWhatItMeans:
    """Cases small enough to count by hand; both tries are held to them."""

    def entered(self, make, *texts: Sequence[int], limits: Limits = ROOMY) -> Trie:
        trie: Trie = make(limits)
        for text in texts:
            trie.start(0)
            trie.append(text)
            trie.stop()
        return trie

    def test_counts(self, make) -> None:
        trie = self.entered(make, [1, 2, 1, 2, 3], [1, 2])
        assert [trie.count(0, run) for run in ([1], [1, 2], [2, 1], [1, 2, 3], [3, 1])] == [3, 3, 1, 1, 0]

    def test_path_follows_the_most_frequent(self, make) -> None:
        trie = self.entered(make, [1, 2, 3], [1, 2, 3], [1, 2, 4])
        draft = trie.speculate(0, [1], Wish(limit=5, factor=2.0))
        assert (draft.tokens, draft.parents, draft.match) == ((2, 3), (-1, 0), 1)
        assert draft.probs == pytest.approx((1.0, 2 / 3))
        assert draft.score == pytest.approx(5 / 3)

    def test_path_stops_at_unlikely_tokens(self, make) -> None:
        trie = self.entered(make, *([1, 2, token] for token in range(3, 7)))
        assert trie.speculate(0, [1], Wish(5, 2.0, min_prob=0.3)).tokens == (2,)

    def test_newest_of_equals(self, make) -> None:
        assert self.entered(make, [1, 2], [1, 3]).speculate(0, [1], Wish(5)).tokens == (3,)
        assert self.entered(make, [1, 3], [1, 2]).speculate(0, [1], Wish(5)).tokens == (2,)

    def test_tree_takes_the_likeliest_nodes(self, make) -> None:
        trie = self.entered(make, [1, 2, 5], [1, 2, 5], [1, 2, 6], [1, 3, 7])
        draft = trie.speculate(0, [1], Wish(limit=4, factor=4.0, min_prob=0.0, mode="tree"))
        assert (draft.tokens, draft.parents) == ((2, 5, 3, 6), (-1, 0, -1, 0))  # of equals, the node found first
        assert draft.probs == pytest.approx((0.75, 0.5, 0.25, 0.25))

    def test_length_grows_with_the_match(self, make) -> None:
        trie = self.entered(make, [1, 2, 3, 4, 5, 6, 7])
        for match in (1, 2, 3):
            draft = trie.speculate(0, [1, 2, 3][:match], Wish(limit=16))
            assert len(draft.tokens) == draft.match == match

    def test_depth_bounds_match_and_continuation(self, make) -> None:
        trie = self.entered(make, list(range(20)), limits=Limits(4, 100, 10))
        assert trie.count(0, [1, 2, 3, 4]) == 1
        assert trie.count(0, [1, 2, 3, 4, 5]) == 0
        draft = trie.speculate(0, list(range(10)), Wish(limit=16, offset=9.0))
        assert (draft.tokens, draft.match) == ((10, 11, 12), 1)

    def test_keys_are_worlds_apart(self, make) -> None:
        trie = self.entered(make, [1, 2, 3])
        trie.start(7)
        trie.append([1, 9])
        assert trie.speculate(7, [1], Wish(5)).tokens == (9,)
        assert trie.speculate(8, [1], Wish(5)).tokens == ()
        assert trie.count(7, [2]) == trie.count(8, [1]) == 0

    def test_oldest_leaves_first(self, make) -> None:
        trie = self.entered(make, [1, 2], [1, 3], [1, 4], limits=Limits(8, 100, 2))
        assert [trie.count(0, [1, token]) for token in (2, 3, 4)] == [0, 1, 1]
        trie = self.entered(make, [1, 2] * 8, [3] * 10, limits=Limits(8, 16, 100))
        assert (trie.sizes.tokens, trie.count(0, [1, 2]), trie.count(0, [3])) == (16, 3, 10)

    def test_verbs_out_of_order(self, make) -> None:
        trie = make(Limits(8, 100, 10))
        for verb in (trie.stop, lambda: trie.append([1])):
            with pytest.raises(BrokenInvariant):
                verb()
        trie.start(0)
        with pytest.raises(BrokenInvariant):
            trie.start(0)


@pytest.mark.parametrize("bad", [{"depth": 1}, {"depth": 201}, {"tokens": 100}, {"sequences": 0}])
def test_impossible_limits(bad: dict[str, int]) -> None:
    with pytest.raises(BrokenInvariant):
        Limits(**bad)


def test_memory_is_that_of_the_window() -> None:
    """Ten windows of text later the trie is as large as after two."""
    rng = random.Random(0)
    trie = MAKER.make(Limits(64, 20_000, 100))
    assert isinstance(trie, NativeTrie)
    grown = []
    for _ in range(100):
        trie.start(rng.randrange(4))
        trie.append([int(rng.paretovariate(1)) for _ in range(2000)])
        trie.stop()
        grown.append(trie.sizes.bytes)
    assert grown[-1] <= 1.3 * grown[20]
    assert grown[-1] < 20_000 * 200


def test_without_a_compiler_the_plain_trie_serves_with_less_text() -> None:
    code = (
        "from cluster.draft.suffix.native import TrieMaker; from cluster.draft.suffix.trie import Limits;"
        "m = TrieMaker(); t = m.make(Limits(8, 10_000)); t.start(0); t.append(range(1000));"
        "print(m.native, t.sizes.tokens)"
    )
    environment = {"OUTRIDER_NO_COMPILER": "1", "PATH": "/usr/bin:/bin"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert out.stdout.split() == ["False", str(10_000 // PLAIN_COST)], out.stderr
