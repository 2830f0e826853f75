"""Prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.draft.ngram import NgramProposer
from cluster.messages import Knobs, SequenceView
from cluster.request import Sampling


def view(tokens: Sequence[int], k: int = 4, sequence: int = 0) -> SequenceView:
    return SequenceView(sequence, tokens, 1, len(tokens) - 1, Sampling(), "coupled", "", None, k, 100)


def guess(tokens: Sequence[int], k: int = 4, sizes: tuple[int, int] = (3, 1)) -> tuple[int, ...]:
    proposer = NgramProposer(*sizes)
    proposer.open(view(tokens))
    offers = proposer.propose([view(tokens, k)], Knobs())
    if offers:
        assert offers[0].base_len == len(tokens)
        assert offers[0].law is None
    return offers[0].tokens if offers else ()


def test_it_copies_what_followed() -> None:
    assert guess([1, 2, 3, 4, 5, 6, 7, 1, 2]) == (3, 4, 5, 6)


def test_the_longest_match_wins_then_the_latest() -> None:
    assert guess([1, 2, 9, 2, 8, 1, 2]) == (9, 2, 8, 1)
    assert guess([2, 9, 5, 2, 8, 5, 2], sizes=(1, 1)) == (8, 5, 2, 8)


def test_past_the_end_the_copy_reads_itself() -> None:
    assert guess([7, 7], k=5) == (7, 7, 7, 7, 7)
    assert guess([1, 2, 3, 1, 2, 3, 1, 2], k=7) == (3, 1, 2, 3, 1, 2, 3)


def test_nothing_seen_before_means_no_offer() -> None:
    assert guess([1, 2, 3]) == ()
    assert guess([1]) == ()
    assert guess([1, 2, 1], sizes=(3, 2)) == ()


def test_sequences_are_apart_and_closed_ones_forgotten() -> None:
    proposer = NgramProposer(3, 1)
    for sequence in (0, 1):
        proposer.open(view([1], sequence=sequence))
    assert proposer.propose([view([5, 6, 5], sequence=0)], Knobs())[0].tokens == (6, 5, 6, 5)
    assert proposer.propose([view([5], sequence=1)], Knobs()) == []
    proposer.close(0)
    proposer.close(0)
    assert list(proposer._indices) == [1]


def plain(tokens: Sequence[int], k: int) -> tuple[int, ...]:
    """The definition, by search."""
    for size in (3, 2, 1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tuple(tokens[start - size : start]) == tuple(tokens[-size:]):
                known = list(tokens)
                for offset in range(k):
                    known.append(known[start + offset])
                return tuple(known[len(tokens) :])
    return ()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(1, 6), max_size=6), st.integers(1, 6))
def test_the_index_finds_what_a_search_finds(tokens: list[int], steps: list[int], k: int) -> None:
    """Also when the tokens arrive in pieces."""
    proposer = NgramProposer(3, 1)
    proposer.open(view(tokens))
    length = 1
    for step in (*steps, len(tokens)):
        length = min(len(tokens), length + step)
        shown = tokens[:length]
        offers = proposer.propose([view(shown, k)], Knobs())
        assert (offers[0].tokens if offers else ()) == plain(shown, k)
