"""Several proposers in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cluster.draft.first import FirstOffer
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.request import Sampling


class Scripted:
    samples: ClassVar[bool] = False

    def __init__(self, name: str, *serves: int) -> None:
        self.name = name
        self.calls: list[tuple[str, object]] = []
        self._serves = serves

    def open(self, view: SequenceView) -> None:
        self.calls.append(("open", view.id))

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        self.calls.append(("propose", [view.id for view in views]))
        return [Offer(view.id, 3, (1,), source=self.name) for view in views if view.id in self._serves]

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        self.calls.append(("settle", len(verdicts)))

    def close(self, sequence: int) -> None:
        self.calls.append(("close", sequence))


def view(sequence: int, method: str | None = None) -> SequenceView:
    return SequenceView(sequence, [1, 2, 3], 3, 2, Sampling(), "coupled", "", method, 3, 9)


def test_with_none_there_is_never_an_offer() -> None:
    nobody = FirstOffer([])
    assert nobody.names == ()
    assert nobody.propose([view(0)], Knobs()) == []


def test_each_row_takes_the_first_offer() -> None:
    first, second = Scripted("a", 0), Scripted("b", 0, 1)
    offers = FirstOffer([first, second]).propose([view(0), view(1), view(2)], Knobs())
    assert [(offer.sequence, offer.source) for offer in offers] == [(0, "a"), (1, "b")]
    assert second.calls == [("propose", [1, 2])]


def test_a_named_method_is_the_only_one_asked() -> None:
    first, second = Scripted("a", 0, 1), Scripted("b", 0, 1)
    both = FirstOffer([first, second])
    assert both.names == ("a", "b")
    offers = both.propose([view(0, "b"), view(1, "a")], Knobs())
    assert [(offer.sequence, offer.source) for offer in offers] == [(1, "a"), (0, "b")]


def test_nobody_is_asked_about_nothing() -> None:
    first, second = Scripted("a", 0), Scripted("b")
    FirstOffer([first, second]).propose([view(0)], Knobs())
    assert second.calls == []


def test_everyone_hears_the_other_verbs() -> None:
    parts = [Scripted("a"), Scripted("b")]
    both = FirstOffer(parts)
    both.open(view(4))
    both.settle([Verdict(4, 0, (1,))])
    both.close(4)
    for part in parts:
        assert part.calls == [("open", 4), ("settle", 1), ("close", 4)]
