"""Law 6 over random schedules: what a round verifies would be the same had the sampled drafts been others.

The same case is played twice; in one round of the second, every token that a law was shipped for is replaced by
another that the law allows. The plan of that round must not differ but in those tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from cluster.messages import Knobs, Offer, Plan, SequenceView
from cluster.request import Speculation
from cluster.verify.judge import Judge
from tests.laws.everything import Case, Witness, alone, cases, engine_of, fitting, play

SAMPLING_KINDS = ("model, near", "model, far", "model, few blocks", "quantized", "seq2seq", "sampled")


class Other(Witness):
    """Replaces what was sampled, where `turned` says so."""

    turned: Callable[[], bool] = staticmethod(lambda: False)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        offers = super().propose(views, knobs)
        return [replace(offer, tokens=other(offer)) for offer in offers] if self.turned() else offers


def other(offer: Offer) -> tuple[int, ...]:
    """Another outcome of the same draws."""
    if offer.law is None:
        return offer.tokens
    tokens = []
    for token, ids, probs in zip(offer.tokens, offer.law.ids, offer.law.probs, strict=False):
        possible = sorted({int(i) for i, p in zip(ids, probs, strict=True) if p > 0})
        tokens.append(possible[(possible.index(token) + 1) % len(possible)])
    return tuple(tokens)


def played(case: Case, at: int) -> list[Plan]:
    """The plans of a run in which round `at` was drafted otherwise; -1: none."""
    asked = fitting(case.setup, case.asked)
    plans: list[Plan] = []

    def wrap(inner: object, law_of: object) -> Other:
        made = Other(inner, law_of)  # type: ignore[arg-type]
        made.turned = lambda: len(plans) == at
        return made

    engine = engine_of(case, asked, {request.id: alone(request) for request in asked}, wrap)
    engine._parts.runner.plans = plans
    play(case, engine, asked)
    return plans


def outline(plan: Plan) -> list[tuple[int, int, int, int]]:
    return [(row.sequence, row.first, len(row.tokens), row.drafts) for row in plan.rows]


def compare(case: Case) -> bool:
    """Whether there was a sampled draft to replace."""
    case = replace(
        case, asked=[replace(one, speculation=Speculation(k=one.speculation.k, rule="ratio")) for one in case.asked]
    )
    plans = played(case, -1)
    drafted = [n for n, plan in enumerate(plans) for row in plan.rows if row.offer is not None and row.offer.law]
    if not drafted:
        return False
    at = drafted[len(drafted) // 2]
    again = played(case, at)
    assert [outline(plan) for plan in again[: at + 1]] == [outline(plan) for plan in plans[: at + 1]]
    return [row.tokens for row in again[at].rows] != [row.tokens for row in plans[at].rows]


def hold(count: int) -> int:
    """How many cases had something replaced."""
    replaced = 0

    @seed(6)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate], report_multiple_bugs=False,
    )  # fmt: skip
    @given(st.sampled_from(SAMPLING_KINDS).flatmap(cases))
    def over(case: Case) -> None:
        nonlocal replaced
        replaced += compare(case)

    over()
    return replaced


def test_a_plan_does_not_look_at_what_was_drawn() -> None:
    assert hold(80) > 15


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_plan_does_not_look_at_what_was_drawn_over_thousands_of_cases() -> None:
    assert hold(1500) > 500


def test_a_plan_that_looks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offer dropped for one of its tokens."""
    original = Judge.admit
    monkeypatch.setattr(
        Judge, "admit", lambda self, offers: [offer for offer in original(self, offers) if 1 not in offer.tokens]
    )
    with pytest.raises(AssertionError):
        hold(200)
