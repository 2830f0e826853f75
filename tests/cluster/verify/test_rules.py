"""The registry, and the rules that may emit what the target alone would not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from cluster.messages import Knobs, Plan, PlanRow, Verdict
from cluster.model.runner import Flight
from cluster.request import (
    LAW_RULES,
    FixedThreshold,
    FollowingThreshold,
    Request,
    RuleName,
    Sampling,
    ScheduledThreshold,
    Speculation,
    Typical,
)
from cluster.verify import judge as judging
from cluster.verify.judge import Judge
from cluster.verify.rules.base import Facts, Ruling
from cluster.verify.rules.registry import RULES
from tests.rulings import plant

P = torch.tensor([[0.6, 0.3, 0.1, 0.0]] * 3, dtype=torch.float64)


def test_every_name_has_a_rule_and_says_what_it_is() -> None:
    assert set(RULES) == set(get_args(RuleName))
    assert {name for name, rule in RULES.items() if rule.exact} == {"coupled", "ratio", "block"}
    assert {name for name, rule in RULES.items() if rule.exact and rule.reads_laws} == LAW_RULES


@pytest.mark.parametrize("name", ["threshold", "typical"])
def test_the_targets_own_draw_always_stands(name: RuleName) -> None:
    """No draft that `coupled` keeps is refused, and what ends a round is the target's own draw."""
    facts = Facts([2, 3], (2, 1, 0), P, threshold=FixedThreshold(0.99), typical=Typical(0.99, 1.0))
    assert RULES[name].decide(facts) == Ruling(1, (2, 1))


@pytest.mark.parametrize(("value", "accepted"), [(0.05, 3), (0.1, 3), (0.2, 2), (0.3, 2), (0.5, 1), (0.7, 0)])
def test_threshold_keeps_what_is_likely_enough(value: float, accepted: int) -> None:
    facts = Facts([0, 1, 2], (3, 3, 3, 3), torch.cat([P, P[:1]]), threshold=FixedThreshold(value))
    assert RULES["threshold"].decide(facts) == Ruling(accepted, (*(0, 1, 2)[:accepted], 3))


def test_typical_is_stricter_where_the_target_is_sure() -> None:
    entropy = -sum(p * math.log(p) for p in (0.6, 0.3, 0.1))
    for delta, accepted in ((0.1 * math.exp(entropy) - 1e-6, 1), (0.1 * math.exp(entropy) + 1e-6, 0)):
        facts = Facts([2], (0, 0), P, typical=Typical(epsilon=1.0, delta=delta))
        assert RULES["typical"].decide(facts).accepted == accepted
    assert RULES["typical"].decide(Facts([2], (0, 0), P, typical=Typical(epsilon=0.09, delta=1.0))).accepted == 1
    assert RULES["typical"].decide(Facts([2], (0, 0), P, typical=Typical(epsilon=0.11, delta=1.0))).accepted == 0


def test_the_schedule_falls_with_every_hundred_tokens() -> None:
    schedule = ScheduledThreshold()
    found = [schedule.at(emitted, ()) for emitted in (0, 99, 100, 250, 1_000, 1_749, 1_750, 90_000)]
    assert found == pytest.approx([0.85, 0.85, 0.83, 0.81, 0.65, 0.51, 0.51, 0.5])


def test_following_moves_towards_the_acceptance_wanted() -> None:
    following = FollowingThreshold(start=0.5, acceptance=0.5, step=0.1, floor=0.2, ceiling=0.8)
    assert following.at(0, ()) == 0.5
    assert following.at(0, [(4, 2)] * 9) == pytest.approx(0.5)
    assert following.at(0, [(4, 4)] * 2) == pytest.approx(0.6)
    assert following.at(0, [(4, 0)] * 2) == pytest.approx(0.4)
    assert following.at(0, [(4, 4)] * 60) == pytest.approx(0.8)
    assert following.at(0, [(4, 4)] * 60 + [(4, 0)]) == pytest.approx(0.75)  # what went beyond the end is forgotten
    assert following.at(0, [(4, 0)] * 60) == pytest.approx(0.2)


def verdict(rule: RuleName, sampling: Sampling, speculation: Speculation, knobs: Knobs, draft: int) -> Verdict:
    """On one draft after a prompt, where the target says 0.6, 0.3, 0.1 at temperature 1."""
    judge = Judge(4, frozenset(), None)
    judge.open(7, Request("r", (1, 2, 3), sampling, replace(speculation, rule=rule)))
    row = PlanRow(7, 2, (3, draft), (0,), drafts=1, wants=2)
    plan = Plan(1, (row,), knobs)
    logits = (P[:2] + 1e-9).log().float()
    return judge.rule(Flight(plan, logits), judge.prepare(plan))[0]


@pytest.mark.parametrize("rule", ["threshold", "typical"])
def test_at_temperature_0_lossy_rules_read_the_law_at_1(rule: RuleName) -> None:
    """As a point mass the law would have nothing to compare: 0.3 stands, 0.0 does not, and greedy goes on."""
    greedy = Sampling(9, temperature=0.0)
    knobs = Knobs(threshold=FixedThreshold(0.25), typical=Typical(0.25, 1.0))
    kept, refused = (verdict(rule, greedy, Speculation(), knobs, draft) for draft in (1, 3))
    assert (kept.accepted, kept.tokens, kept.rule, kept.lossy) == (1, (1, 0), rule, True)
    assert (refused.accepted, refused.tokens) == (0, (0,))


@pytest.mark.parametrize("rule", ["coupled", "ratio", "block"])
def test_exact_rules_say_so_and_stay_greedy(rule: RuleName) -> None:
    told = verdict(rule, Sampling(9, temperature=0.0), Speculation(), Knobs(), 1)
    assert (told.accepted, told.tokens, told.rule, told.lossy) == (0, (0,), rule, False)


def test_the_requests_threshold_goes_before_the_knobs() -> None:
    knobs = Knobs(threshold=FixedThreshold(0.9))
    asked = Speculation(threshold=FixedThreshold(0.2))
    assert verdict("threshold", Sampling(9, temperature=0.0), asked, knobs, 1).accepted == 1
    assert verdict("threshold", Sampling(9, temperature=0.0), Speculation(), knobs, 1).accepted == 0


def test_rules_learn_what_became_of_earlier_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[tuple[int, int]]]] = []

    def noted(facts: Facts) -> Ruling:
        seen.append((facts.emitted, list(facts.outcomes)))
        return RULES["coupled"].decide(facts)

    plant(monkeypatch, "coupled", noted)
    judge = Judge(4, frozenset(), None)
    judge.open(7, Request("r", (1, 2, 3), Sampling(99, temperature=0.0)))
    for drafts in ((0, 1), (), (0,)):
        row = PlanRow(7, 2, (3, *drafts), (0,), drafts=len(drafts), wants=len(drafts) + 1)
        plan = Plan(1, (row,), Knobs())
        judge.rule(Flight(plan, P[: len(drafts) + 1].float()), judge.prepare(plan))
    assert seen == [(0, []), (2, [(2, 1)]), (3, [(2, 1)])]


@pytest.mark.parametrize(
    ("rules", "draws", "laws"),
    [(("coupled", "coupled"), 4, 0), (("ratio", "block"), 0, 4), (("coupled", "ratio"), 2, 2), (("typical",), 2, 2)],
)
def test_only_what_a_rule_reads_is_computed(
    rules: tuple[RuleName, ...], draws: int, laws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = {"draw": 0, "probabilities": 0}
    for name in done:

        def counted(
            rows: torch.Tensor, *rest: object, name: str = name, inner: object = getattr(judging, name)
        ) -> object:
            done[name] += len(rows)
            return inner(rows, *rest)

        monkeypatch.setattr(judging, name, counted)
    judge = Judge(4, frozenset(), None)
    rows = []
    for sequence, rule in enumerate(rules):
        judge.open(sequence, Request(f"{sequence}", (1,), Sampling(9), Speculation(rule=rule)))
        rows.append(PlanRow(sequence, 0, (1, 2), (0,), drafts=1, wants=2))
    plan = Plan(1, tuple(rows), Knobs())
    judge.rule(Flight(plan, torch.zeros(2 * len(rules), 4)), judge.prepare(plan))
    assert (done["draw"], done["probabilities"]) == (draws, laws)
