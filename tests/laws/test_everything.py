"""Laws 1 to 8 over everything at once: all parameters x all proposers x all rules x all schedules."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import get_args
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from cluster.request import RuleName, Sampling, Speculation
from tests.laws.asked import every_samplings, every_speculations
from tests.laws.everything import METHODS, Case, Tally, cases, check
from tests.proposers import KINDS

thorough = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # a failing case is printed as it is: making it smaller takes minutes
    report_multiple_bugs=False,
)


def hold(kind: str, count: int) -> Tally:
    """Over that many cases with this kind of proposer in them."""
    tally = Tally()

    @seed(crc32(kind.encode()))  # other cases for each kind, the same in each run
    @settings(thorough, max_examples=count)
    @given(cases(kind))
    def over(case: Case) -> None:
        check(case, tally)

    over()
    assert tally.cases >= count
    assert METHODS[kind] in tally.sources, tally  # or nothing was held of it
    return tally


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_it_at_once(kind: str) -> None:
    tally = hold(kind, 20)
    assert tally.compared > 2, tally


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_cases(kind: str) -> None:
    tally = hold(kind, 400)
    logging.getLogger(__name__).info("%s: %s", kind, tally)
    assert min(tally.compared, tally.accepted, tally.preempted, tally.aborted) > 20, tally
    assert tally.rules == set(get_args(RuleName)), tally


def test_every_field_varies() -> None:
    """A field that `Sampling` or `Speculation` gains has to be drawn too."""
    seen: dict[str, set] = {field.name: set() for kind in (Sampling, Speculation) for field in fields(kind)}

    @seed(0)
    @settings(thorough, max_examples=400)
    @given(st.one_of(every_samplings(), every_speculations(["ngram"])))
    def look(drawn: Sampling | Speculation) -> None:
        for field in fields(drawn):
            seen[field.name].add(repr(getattr(drawn, field.name)))

    look()
    assert [name for name, values in seen.items() if len(values) < 2] == []
