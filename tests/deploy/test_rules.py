"""Rules over HTTP: what a request may say of its own, and how a lossy answer is labelled."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from cluster.errors import RequestError
from cluster.messages import SourceCount, Statistics
from cluster.request import FixedThreshold, FollowingThreshold, ScheduledThreshold, Speculation
from deploy.openai.schema import ChatBody, read
from deploy.openai.stream import usage

TURN = {"role": "user", "content": "hi"}


def wish(**speculation: Any) -> Speculation:
    [ask] = read(ChatBody, {"messages": [TURN], "speculation": speculation}).asks(10)
    assert pickle.loads(pickle.dumps(ask)) == ask  # it crosses a process boundary
    return ask.speculation


def test_a_request_chooses_rule_threshold_and_retries() -> None:
    assert wish(rule="block", max_retries=8) == Speculation(rule="block", max_retries=8)
    for given, made in (
        ({"kind": "fixed", "value": 0.4}, FixedThreshold(0.4)),
        ({"kind": "scheduled"}, ScheduledThreshold(0.85, 0.02, 100, 0.5)),
        ({"kind": "scheduled", "floor": 0.7}, ScheduledThreshold(floor=0.7)),
        ({"kind": "following", "acceptance": 0.8}, FollowingThreshold(acceptance=0.8)),
    ):
        assert wish(rule="threshold", threshold=given) == Speculation(rule="threshold", threshold=made)


@pytest.mark.parametrize(
    ("speculation", "param"),
    [
        ({"max_retries": 2}, "speculation.max_retries"),
        ({"max_retries": 9}, "speculation.max_retries"),
        ({"max_retries": "many"}, "speculation.max_retries"),
        ({"threshold": 0.5}, "speculation.threshold"),
        ({"threshold": {"kind": "falling"}}, "speculation.threshold"),
        ({"threshold": {"value": 0.5}}, "speculation.threshold"),
        ({"threshold": {"kind": "fixed", "value": 0}}, "speculation.threshold.value"),
        ({"threshold": {"kind": "fixed", "start": 0.5}}, "speculation.threshold.start"),
        ({"threshold": {"kind": "scheduled", "every": 0}}, "speculation.threshold.every"),
        ({"threshold": {"kind": "scheduled", "start": 0.4}}, "speculation.threshold"),
        ({"threshold": {"kind": "following", "start": 0.99}}, "speculation.threshold"),
    ],
)
def test_refusals_name_the_field(speculation: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        wish(**speculation)
    assert (refused.value.param or "") == param


def test_usage_says_which_rule_and_whose_drafts() -> None:
    ours = Statistics(drafted=9, accepted=5, by_source=(SourceCount("ngram", 6, 4), SourceCount("model", 3, 1)))
    lossy = Statistics(drafted=2, accepted=2, by_source=(SourceCount("model", 2, 2),), rule="typical", lossy=True)
    block = usage([ours, lossy], 2)["outrider"]
    assert block["by_source"] == {"ngram": {"drafted": 6, "accepted": 4}, "model": {"drafted": 5, "accepted": 3}}
    assert (block["rule"], block["lossy"]) == ("coupled, typical", True)
    assert (usage([ours], 1)["outrider"]["rule"], usage([ours], 1)["outrider"]["lossy"]) == ("coupled", False)
