"""Which proposer a row asks first: by settled rounds, the same in every run, and everyone now and then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from cluster.draft.blend import ExpectedOffer
from cluster.draft.paced import Paced
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.request import Sampling

TRUTH = 1


class Steady:
    """Offers k tokens whose first `good` stand; `silent` never offers."""

    samples: ClassVar[bool] = False

    def __init__(self, name: str, good: int, *, silent: bool = False) -> None:
        self.name = name
        self.asked: list[list[int]] = []
        self.closed: list[int] = []
        self._good = good
        self._silent = silent

    def open(self, view: SequenceView) -> None: ...

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        self.asked.append([view.id for view in views])
        if self._silent:
            return []
        return [
            Offer(view.id, len(view.tokens), (TRUTH,) * self._good + (0,) * (view.k - self._good), source=self.name)
            for view in views
        ]

    def settle(self, verdicts: Sequence[Verdict]) -> None: ...

    def close(self, sequence: int) -> None:
        self.closed.append(sequence)


def view(sequence: int = 0, method: str | None = None, k: int = 4) -> SequenceView:
    return SequenceView(sequence, [1, 1, 1], 3, 2, Sampling(), "coupled", "", method, k, 99)


def verdict(offer: Offer, cut: int | None = None) -> Verdict:
    """What a target that always says TRUTH makes of an offer of which `cut` tokens were verified."""
    seen = offer.tokens[:cut]
    stood = next((at for at, token in enumerate(seen) if token != TRUTH), len(seen))
    return Verdict(offer.sequence, stood, (TRUTH,) * (stood + 1))


def rounds(blend: ExpectedOffer, count: int, shown: SequenceView, cut: int | None = None) -> list[str]:
    sources = []
    for _ in range(count):
        (offer,) = blend.propose([shown], Knobs())
        sources.append(offer.source)
        blend.settle([verdict(offer, cut)])
    return sources


def test_the_one_whose_drafts_stand_is_asked_and_the_other_now_and_then() -> None:
    blend = ExpectedOffer([Steady("bad", 0), Steady("good", 4)])
    blend.open(view())
    count = Counter(rounds(blend, 200, view()))
    assert count["good"] > 180
    assert 200 // 24 <= count["bad"] <= 12


def test_it_turns_when_the_tide_does() -> None:
    first, second = Steady("a", 4), Steady("b", 1)
    blend = ExpectedOffer([first, second])
    blend.open(view())
    rounds(blend, 50, view())
    first._good, second._good = 0, 4
    assert Counter(rounds(blend, 60, view())[-30:])["b"] >= 27


def test_before_anything_is_known_the_order_configured_holds() -> None:
    blend = ExpectedOffer([Steady("a", 0), Steady("b", 4)])
    blend.open(view())
    assert rounds(blend, 2, view()) == ["a", "b"]


def test_a_new_sequence_starts_from_what_all_have_shown() -> None:
    blend = ExpectedOffer([Steady("bad", 0), Steady("good", 4)])
    blend.open(view())
    rounds(blend, 50, view())
    blend.open(view(1))
    assert rounds(blend, 1, view(1)) == ["good"]


def test_rows_differ() -> None:
    """One text where the first is right, one where the second is: each row finds its own."""

    class OnlyFor(Steady):
        def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
            made = super().propose(views, knobs)
            return [
                offer
                if offer.sequence == self._good
                else Offer(offer.sequence, 3, (0,) * len(offer.tokens), source=self.name)
                for offer in made
            ]

        def __init__(self, name: str, sequence: int) -> None:
            super().__init__(name, sequence)

    blend = ExpectedOffer([OnlyFor("a", 1), OnlyFor("b", 2)])
    shown = [view(1, k=2), view(2, k=2)]
    for one in shown:
        blend.open(one)
    last: dict[int, str] = {}
    for _ in range(40):
        offers = [
            Offer(o.sequence, 3, (1,) * 2 if 1 in o.tokens else (0,) * 2, source=o.source)
            for o in blend.propose(shown, Knobs())
        ]
        last = {offer.sequence: offer.source for offer in offers}
        blend.settle([verdict(offer) for offer in offers])
    assert last == {1: "a", 2: "b"}


def test_who_is_silent_is_followed_by_the_next() -> None:
    blend = ExpectedOffer([Steady("silent", 4, silent=True), Steady("b", 1), Steady("c", 0)])
    blend.open(view())
    assert set(rounds(blend, 30, view())) == {"b", "c"}


def test_a_named_method_is_the_only_one_asked() -> None:
    first, second = Steady("a", 4), Steady("b", 0)
    blend = ExpectedOffer([first, second])
    assert blend.names == ("a", "b")
    blend.open(view())
    assert set(rounds(blend, 40, view(method="b"))) == {"b"}
    assert first.asked == []
    assert blend.propose([view(method="c")], Knobs()) == []


def test_a_draft_cut_by_the_scheduler_is_no_failure() -> None:
    blend = ExpectedOffer([Steady("a", 4)])
    blend.open(view())
    before = blend.expected(view(), 0)
    rounds(blend, 20, view(), cut=1)
    assert blend.expected(view(), 0) > before


def test_only_settled_rounds_count() -> None:
    """Law 6: until a verdict comes, what was offered changes nothing."""
    blend = ExpectedOffer([Steady("a", 0), Steady("b", 4)])
    blend.open(view())
    expected = [blend.expected(view(), index) for index in (0, 1)]
    for _ in range(10):
        blend.propose([view()], Knobs())
    assert [blend.expected(view(), index) for index in (0, 1)] == expected


def test_the_same_rounds_give_the_same_choices() -> None:
    def run() -> list[str]:
        blend = ExpectedOffer([Steady("a", 2), Steady("b", 3), Steady("c", 1)])
        blend.open(view())
        return rounds(blend, 100, view())

    assert run() == run()


def test_nothing_grows_over_a_thousand_requests() -> None:
    parts = [Steady("a", 1), Steady("b", 2)]
    blend = ExpectedOffer(parts)
    for sequence in range(1000):
        blend.open(view(sequence))
        rounds(blend, 2, view(sequence))
        blend.close(sequence)
    blend.close(5)
    assert not blend._courses
    assert [len(part.closed) for part in parts] == [1001, 1001]


def first_asked(pass_s: float) -> float:
    """Share of late rounds answered by a model whose drafts all stand, beside copies of which two in four do."""
    model = Paced(Steady("model", 4), lambda rows: pass_s)
    blend = ExpectedOffer([model, Steady("copy", 2)], lambda tokens: 1.0)
    blend.open(view())
    return rounds(blend, 100, view())[40:].count("model") / 60


def test_a_model_is_asked_where_its_passes_are_worth_it() -> None:
    assert first_asked(0.01) > 0.9
    assert first_asked(1.0) < 0.1
