"""Token recycling: the newest successor is followed, salts never mix, memory is bounded."""

from __future__ import annotations

from dataclasses import replace

from cluster.draft.recycling import RecyclingProposer
from cluster.messages import Knobs, SequenceView, Verdict
from cluster.request import Sampling


def view(tokens: list[int], sequence: int = 0, k: int = 4, salt: str = "") -> SequenceView:
    return SequenceView(sequence, tokens, 3, len(tokens) - 1, Sampling(), "coupled", salt, None, k, 100)


def offered(made: RecyclingProposer, shown: SequenceView) -> tuple[int, ...]:
    offers = made.propose([shown], Knobs())
    return offers[0].tokens if offers else ()


def test_the_newest_successor_is_followed() -> None:
    made = RecyclingProposer(100)
    made.open(view([1, 2, 3, 1, 4, 1]))
    assert offered(made, view([1, 2, 3, 1, 4, 1])) == (4, 1, 4, 1)
    assert offered(made, view([1, 2, 3, 1, 4, 1, 3], k=1)) == (1,)


def test_a_token_never_followed_offers_nothing() -> None:
    made = RecyclingProposer(100)
    made.open(view([1, 2, 3]))
    assert offered(made, view([1, 2, 3])) == ()


def test_answers_teach_the_next_request_of_the_same_salt_to_their_last_token() -> None:
    made = RecyclingProposer(100)
    made.open(view([1, 2, 3], salt="a"))
    made.settle([Verdict(0, 0, (5, 6), finish="stop")])
    made.close(0)
    made.open(view([9, 3], 1, salt="a"))
    assert offered(made, view([9, 3], 1, salt="a")) == (5, 6)
    made.open(view([9, 3], 2, salt="b"))
    assert offered(made, view([9, 3], 2, salt="b")) == ()


def test_a_lost_verdict_is_read_from_the_next_view() -> None:
    told, missed = RecyclingProposer(100), RecyclingProposer(100)
    for made in (told, missed):
        made.open(view([1, 2, 3]))
    told.settle([Verdict(0, 0, (4, 5, 3))])
    shown = view([1, 2, 3, 4, 5, 3])
    assert offered(told, shown) == offered(missed, shown) == (4, 5, 3, 4)


def test_memory_is_bounded_and_nothing_grows_with_requests() -> None:
    made = RecyclingProposer(50)
    for number in range(1000):
        shown = view([number % 700, (number * 7) % 701, (number * 13) % 703], number, salt=str(number % 5))
        made.open(shown)
        made.settle([Verdict(number, 0, (number % 90, number % 91))])
        offered(made, replace(shown, tokens=[*shown.tokens, number % 90, number % 91]))
        made.close(number)
        made.close(number)
        assert made.pairs <= 50
        assert made.pairs == sum(len(kept) for table in made._tables.values() for kept in table.values())
    assert not made._readers


def test_one_salt_larger_than_the_bound_forgets_its_oldest_pairs() -> None:
    made = RecyclingProposer(3)
    made.open(view([1, 2, 3, 4, 5]))
    assert made.pairs == 3
    assert offered(made, view([1, 2, 3, 4, 5, 1])) != (2,)
    assert offered(made, view([1, 2, 3, 4, 5, 1, 4], k=1)) == (5,)
