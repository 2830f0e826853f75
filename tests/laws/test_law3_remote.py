"""Laws 3 and 7: behind a channel that loses, doubles, delays and reorders, `ratio` and `block` keep the law.

Their drafts travel with the law they were drawn from; that a law which was not is seen through the
channel shows that the test could tell.
"""

from __future__ import annotations

import pytest

from cluster.draft.lookahead import Lookahead, Pearl
from cluster.draft.proposer import Proposer
from cluster.draft.server import Sync
from cluster.request import RuleName
from tests.fakes import draft_proposer
from tests.laws.chi_square import LEAST_P
from tests.laws.test_law3_exact import DRAFT, FULL, PLANTED, SETUP, _Misstating, answers, p_value
from tests.remote import WILD, MakeStrategy, remote, timeless

COUNT = 300


def drafter() -> Proposer:
    return draft_proposer(SETUP, DRAFT, num_blocks=400)


@pytest.mark.parametrize(
    "strategy",
    [Sync, timeless(Lookahead), pytest.param(timeless(Pearl), marks=pytest.mark.soak)],
    ids=["sync", "lookahead", "pearl"],
)
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_the_law_survives_the_channel(rule: RuleName, strategy: MakeStrategy) -> None:
    far = remote(drafter(), faults=WILD, strategy=strategy, steps=6)
    assert p_value(answers(rule, [far], COUNT)) > LEAST_P
    assert far.stats.hits > 0


@pytest.mark.soak
@pytest.mark.parametrize("strategy", [timeless(Lookahead), timeless(Pearl)], ids=["lookahead", "pearl"])
@pytest.mark.parametrize("rule", ["ratio", "block", "coupled"])
def test_the_law_survives_looking_ahead(rule: RuleName, strategy: MakeStrategy) -> None:
    assert p_value(answers(rule, [remote(drafter(), strategy=strategy)], FULL)) > LEAST_P


@pytest.mark.soak
@pytest.mark.parametrize("rule", ["ratio", "block", "coupled"])
def test_the_law_survives_many_channels(rule: RuleName) -> None:
    assert p_value(answers(rule, [remote(drafter(), drafter(), faults=WILD)], FULL)) > LEAST_P


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_law_that_was_not_sampled_is_seen_through_the_channel(rule: RuleName) -> None:
    assert p_value(answers(rule, [remote(_Misstating(drafter()))], PLANTED)) < LEAST_P
