"""Stop strings over text in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.text.stop import StopStrings


def read(stops: list[str], pieces: list[str]) -> tuple[list[str], str, bool]:
    watch = StopStrings(stops)
    shown = [watch.push(piece) for piece in pieces]
    return shown, watch.finish(), watch.stopped


def test_without_stops_text_passes() -> None:
    assert read([], ["a", "", "b"]) == (["a", "", "b"], "", False)


def test_a_stop_across_pieces_is_not_shown() -> None:
    assert read(["END"], ["onE", "N", "D!", "more"]) == (["on", "", "", ""], "", True)


def test_what_may_become_a_stop_is_held_and_released() -> None:
    assert read(["END"], ["aE", "N", "x"]) == (["a", "", "ENx"], "", False)


def test_what_is_held_at_the_end_is_shown() -> None:
    assert read(["END"], ["aEN"]) == (["a"], "EN", False)


def test_a_beginning_that_repeats_is_followed() -> None:
    assert read(["aab"], ["a", "a", "a", "b", "c"]) == (["", "", "a", "", ""], "", True)


@pytest.mark.parametrize("pieces", [["xabcd"], ["xab", "cd"], list("xabcd")])
def test_of_overlapping_stops_the_first_completed_wins(pieces: list[str]) -> None:
    shown, rest, stopped = read(["abcd", "bc"], pieces)
    assert ("".join(shown), rest, stopped) == ("xa", "", True)


def test_of_two_completed_at_once_the_longer_is_hidden() -> None:
    assert read(["c", "abc"], ["xabc"])[0] == ["x"]


def by_the_letter(stops: list[str], text: str) -> tuple[str, bool]:
    """The definition: append letters until the text ends in a stop string; the longest such is cut."""
    seen = ""
    for letter in text:
        seen += letter
        ending = [stop for stop in stops if seen.endswith(stop)]
        if ending:
            return seen[: -max(len(stop) for stop in ending)], True
    return seen, False


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_pieces_do_not_matter(stops: list[str], pieces: list[str]) -> None:
    watch = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += watch.push(piece)
        assert not any(stop in shown for stop in stops)
    shown += watch.finish()
    assert (shown, watch.stopped) == by_the_letter(stops, "".join(pieces))
