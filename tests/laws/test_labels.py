"""Lossy rules are what they say and labelled so; drafts are counted by whoever made them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.messages import Knobs
from cluster.request import (
    FixedThreshold,
    Request,
    RuleName,
    Sampling,
    Speculation,
)
from tests.fakes import FakeSetup, fake_engine, run
from tests.laws.schedules import (
    LAWS,
    PROPOSERS,
    VOCAB,
    alone,
)


@pytest.mark.parametrize("rule", ["threshold", "typical"])
def test_a_lossy_rule_does_emit_what_the_target_would_not(rule: RuleName) -> None:
    """Were it not so, the label would be worth nothing; and it accepts more than `coupled`."""
    setup = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=4, threshold=FixedThreshold(0.05), adaptive=False))
    request = Request("r", (1, 2, 3), Sampling(60, seed=5, ignore_eos=True))
    share = {}
    for name in ("coupled", rule):
        engine = fake_engine(setup, LAWS, PROPOSERS["sampled"](setup, {}))
        answer = run(engine, [replace(request, speculation=Speculation(rule=name))])["r"]
        statistics = answer.deltas[-1].statistics
        share[name] = statistics.accepted / statistics.drafted
        assert (answer.tokens != alone(request).tokens) is (name == rule)
    assert share[rule] > share["coupled"]


def test_drafts_are_counted_by_whoever_made_them() -> None:
    setup = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=3, adaptive=False))
    looping = lambda context: LAWS(context[-1:]) * 9  # noqa: E731
    request = Request("r", (1, 2, 3, 4, 5), Sampling(40, temperature=0.0, ignore_eos=True))
    answer = run(fake_engine(setup, looping, PROPOSERS["first of several"](setup, {})), [request])["r"]
    statistics = answer.deltas[-1].statistics
    counts = {count.source: count for count in statistics.by_source}
    assert len(counts) >= 2
    assert all(0 <= count.accepted <= count.drafted for count in counts.values())
    assert sum(count.drafted for count in counts.values()) == statistics.drafted


def test_a_label_outlives_the_lossy_rounds() -> None:
    setup = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=3, rule="typical"))
    engine = fake_engine(setup, LAWS, PROPOSERS["liar"](setup, {}))
    engine.submit(Request("r", (1, 2, 3), Sampling(20, ignore_eos=True)))
    engine.step()
    engine.set_knobs(replace(engine.knobs, rule="coupled"))
    (news,) = engine.step()
    assert (news.statistics.rule, news.statistics.lossy) == ("coupled", True)
