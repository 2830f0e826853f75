"""Rules row by row in one batch: each keeps its own word, and nobody else's row changes."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.messages import Knobs
from cluster.request import (
    FixedThreshold,
    FollowingThreshold,
    Request,
    RuleName,
    Sampling,
    ScheduledThreshold,
    Speculation,
)
from cluster.verify.rules.registry import RULES
from tests.fakes import FakeSetup, fake_engine, run
from tests.laws.schedules import (
    LAWS,
    PROPOSERS,
    VOCAB,
    alone,
    batches,
    fitting,
    proposer_names,
    proposers,
    rich_samplings,
    setups,
)

mixed_speculations = st.builds(
    Speculation,
    enabled=st.sampled_from((True, True, True, False)),
    k=st.sampled_from((None, None, 0, 1, 7)),
    rule=st.sampled_from(get_args(RuleName)),
    threshold=st.sampled_from((None, FixedThreshold(0.2), ScheduledThreshold(every=2), FollowingThreshold())),
    max_retries=st.sampled_from((None, 3, 8)),
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(setups, proposer_names, batches(rich_samplings), st.lists(mixed_speculations, min_size=6, max_size=6))
def test_each_row_keeps_the_word_of_its_rule(
    setup: FakeSetup, name: str, asked: list[Request], wishes: list[Speculation]
) -> None:
    """`coupled`, and every exact rule at temperature 0, are the target alone whatever rules run beside."""
    asked = [replace(request, speculation=wish) for request, wish in zip(asked, wishes, strict=False)]
    asked = fitting(setup, asked)
    twins = {request.id: alone(request, text=True) for request in asked}
    told = run(fake_engine(setup, LAWS, proposers(name, setup, asked, twins), text=True), asked)
    for request in asked:
        answer, twin, rule = told[request.id], twins[request.id], request.speculation.rule
        statistics = answer.deltas[-1].statistics
        assert (statistics.rule, statistics.lossy) == (rule, not RULES[rule].exact)
        assert sum(count.drafted for count in statistics.by_source) == statistics.drafted
        assert sum(count.accepted for count in statistics.by_source) == statistics.accepted
        if rule == "coupled" or (RULES[rule].exact and request.sampling.greedy):
            assert (answer.tokens, answer.text, answer.finish) == (twin.tokens, twin.text, twin.finish)
            assert answer.logprobs == twin.logprobs


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
