"""Trees: the laws for what is verified all at once, with chains and plain rows beside them.

The proposers of `PROPOSERS` that draft trees stand in every law's own test; here is what only trees
can get wrong: laws at temperature > 0, paths laid straight, shared budgets, prefixes found later.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from cluster.draft.branching import Branching
from cluster.draft.proposer import Proposer
from cluster.draft.recycling import RecyclingProposer
from cluster.draft.suffix.proposer import SuffixProposer
from cluster.draft.suffix.trie import Limits, Wish
from cluster.messages import DraftLaw, Knobs
from cluster.request import Request, RuleName, Sampling, Speculation
from cluster.sched.scheduler import Scheduler
from cluster.verify.rules.base import Facts, Ruling, follow
from tests.fakes import FakeSetup, RandomTrees, draft_proposer, fake_engine, ngram, run
from tests.laws.chi_square import LEAST_P, SPAN, ChainLaws, windows_p_value
from tests.laws.schedules import LAWS, OTHER_LAWS, VOCAB, alone, batches, fitting, rich_samplings, setups
from tests.rulings import plant

TARGET = ChainLaws(((0.2, 0.5, 0.3), (0.45, 0.25, 0.3), (0.3, 0.3, 0.4)))
DRAFT = ChainLaws(((0.3, 0.4, 0.3), (0.3, 0.3, 0.4), (0.4, 0.35, 0.25)))
ANSWER = 8 * SPAN
COUNT = 150
TREES = Knobs(k=4, token_budget=512, adaptive=False, tree_nodes=128)
SMALL = FakeSetup(
    vocab_size=3,
    block_tokens=4,
    num_blocks=400,
    max_sequences=16,
    max_waiting=COUNT,
    eos_ids=frozenset(),
    prefix=False,
    knobs=TREES,
)


def drafters(name: str) -> list[Proposer]:
    limits = Limits(8, 4000, 200)
    return {
        "random": lambda: [RandomTrees(3)],
        "model": lambda: [draft_proposer(SMALL, DRAFT, branching=Branching(2, 8, 4))],
        "suffix": lambda: [SuffixProposer(Wish(8, 2.0, 2.0, 0.0, "tree"), limits, replace(limits, sequences=1))],
        "recycling": lambda: [RecyclingProposer(500, successors=3)],
    }[name]()


def p_value(rule: RuleName, name: str) -> tuple[float, int]:
    """And how many branching trees were verified."""
    asked = [Request(str(n), (n % 3,), Sampling(max_tokens=ANSWER, temperature=1.0, seed=n)) for n in range(COUNT)]
    engine = fake_engine(replace(SMALL, knobs=replace(TREES, rule=rule)), TARGET, drafters(name))
    told = run(engine, asked)
    trees = sum(row.parents is not None for plan in engine._parts.runner.plans for row in plan.rows)
    answers = [(request.prompt[-1], told[request.id].tokens) for request in asked]
    return windows_p_value(answers, TARGET.chances(1.0)), trees


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("coupled", "model"),
        ("block", "random"),
        *(("ratio", name) for name in ("random", "model", "suffix", "recycling")),
    ],
)
def test_trees_follow_the_law(rule: RuleName, name: str) -> None:
    found, trees = p_value(rule, name)
    assert trees > COUNT  # a round or more of each answer
    assert found > LEAST_P


@pytest.mark.parametrize(("rule", "name"), [("coupled", "random"), ("block", "model"), ("ratio", "model")])
def test_a_child_kept_for_its_brother_is_seen(rule: RuleName, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tempting fault: try the next child with a draw of its own after one was refused."""

    def generous(facts: Facts) -> Ruling:
        def says(slot: int) -> int:
            draws = [facts.own[slot] if facts.own else facts.drawn(slot)] + [
                int(torch.multinomial(facts.target_PV[slot], 1)) if len(facts.target_PV) else 0
                for _ in facts.children(slot)
            ]
            wanted = {facts.drafts[node] for node in facts.children(slot)}
            return next((draw for draw in draws if draw in wanted), draws[0])

        return follow(facts, says)

    torch.manual_seed(0)
    plant(monkeypatch, rule, generous)
    assert p_value(rule, name)[0] < LEAST_P


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_draw_read_at_every_node_is_seen(rule: RuleName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that share one number: what was drawn for the parent decides for its children too."""
    noise = Facts.noise
    monkeypatch.setattr(Facts, "noise", lambda self, slot, stream: noise(self, 0, stream))
    assert p_value(rule, "model")[0] < LEAST_P


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(setups, batches(rich_samplings, largest=4))
def test_trees_chains_and_plain_rows_share_steps(setup: FakeSetup, asked: list[Request]) -> None:
    """Penalties, cuts, stop strings and log-probabilities see one token at a time along the path."""
    asked = fitting(setup, asked)
    kinds = ("trees", "ngram", "model")
    asked = [
        request if n % 4 == 3 else replace(request, speculation=replace(request.speculation, method=kinds[n % 3]))
        for n, request in enumerate(asked)
    ]
    drafter = draft_proposer(setup, OTHER_LAWS, branching=Branching(3, 20, 5))
    engine = fake_engine(setup, LAWS, [RandomTrees(VOCAB, 4), ngram(), drafter], text=True)
    told = run(engine, asked)
    for request in asked:
        answer, twin = told[request.id], alone(replace(request, speculation=Speculation()), text=True)
        assert (answer.tokens, answer.finish, answer.text) == (twin.tokens, twin.finish, twin.text)
        assert answer.logprobs == twin.logprobs


def asked_greedily(count: int, length: int = 20) -> list[Request]:
    sampling = Sampling(length, temperature=0.0, ignore_eos=True)
    return [Request(f"r{n}", (1, 2, n % VOCAB), sampling, salt="") for n in range(count)]


def test_statistics_count_nodes_and_depths() -> None:
    setup = FakeSetup(vocab_size=VOCAB, knobs=TREES)
    engine = fake_engine(setup, LAWS, [draft_proposer(setup, OTHER_LAWS, branching=Branching(3, 20, 4))])
    statistics = run(engine, asked_greedily(1))["r0"].deltas[-1].statistics
    rows = [row for plan in engine._parts.runner.plans for row in plan.rows if row.drafts]
    assert statistics.drafted == sum(row.drafts for row in rows) > sum(statistics.drafted_by_position)
    assert len(statistics.drafted_by_position) <= 4
    assert sum(statistics.accepted_by_position) == statistics.accepted > 0
    assert all(a <= d for a, d in zip(statistics.accepted_by_position, statistics.drafted_by_position, strict=True))
    assert statistics.by_source[0].drafted == statistics.drafted


def test_a_batch_shares_the_nodes_and_becomes_chains() -> None:
    setup = FakeSetup(vocab_size=VOCAB, num_blocks=200, max_sequences=16, knobs=replace(TREES, tree_nodes=24))
    sizes = {}
    for count in (1, 2, 4, 12):
        drafter = draft_proposer(setup, OTHER_LAWS, num_blocks=200, branching=Branching(4, 64, 4))
        engine = fake_engine(setup, LAWS, [drafter])
        run(engine, asked_greedily(count))
        rows = [row for plan in engine._parts.runner.plans if len(plan.rows) == count for row in plan.rows]
        sizes[count] = max(row.drafts for row in rows)
        assert any(row.parents for row in rows) == (count <= 4)
    assert sizes == {1: 24, 2: 12, 4: 6, 12: 4}


def test_a_tree_without_room_shrinks_to_its_first_path() -> None:
    """Four blocks of four: a tree's nodes do not fit at the end, where a chain still does."""
    setup = FakeSetup(vocab_size=VOCAB, block_tokens=4, num_blocks=5, max_sequences=1, knobs=TREES)
    twin = alone(request := Request("r", (1, 2, 3), Sampling(17, temperature=0.0, ignore_eos=True)))
    engine = fake_engine(setup, LAWS, [draft_proposer(setup, OTHER_LAWS, num_blocks=64, branching=Branching(4, 64, 4))])
    assert run(engine, [request])["r"].tokens == twin.tokens
    rows = [row for plan in engine._parts.runner.plans for row in plan.rows if row.offer is not None]
    assert any(row.parents is None and row.offer.parents is not None and row.drafts > 1 for row in rows)


def repeated(engine_of: FakeSetup) -> tuple[int, int]:
    """The same prompt again and again, each continuing what the last one said: (differences, tokens found cached)."""
    engine = fake_engine(engine_of, LAWS, [draft_proposer(engine_of, OTHER_LAWS, branching=Branching(4, 64, 4))])
    wrong = found = 0
    prompt: tuple[int, ...] = (1, 2, 3)
    for turn in range(4):
        request = Request(f"r{turn}", prompt, Sampling(9, temperature=0.0, ignore_eos=True))
        answer = run(engine, [request])[request.id]
        wrong += answer.tokens != alone(request).tokens
        found += answer.deltas[-1].statistics.cached_tokens
        prompt += answer.tokens
    return wrong, found


def test_blocks_with_accepted_paths_are_found_and_right() -> None:
    setup = FakeSetup(vocab_size=VOCAB, block_tokens=2, knobs=TREES)
    wrong, found = repeated(setup)
    assert wrong == 0
    assert found > 20


def test_a_path_not_laid_straight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_straighten", lambda self, row, verdict: None)
    request = Request("r", (1, 2, 3), Sampling(40, temperature=0.0, ignore_eos=True))
    setup = FakeSetup(vocab_size=VOCAB, knobs=TREES)
    drafter = draft_proposer(setup, OTHER_LAWS, branching=Branching(4, 64, 4))
    assert run(fake_engine(setup, LAWS, [drafter]), [request])["r"].tokens != alone(request).tokens


def test_aborted_and_preempted_between_verdict_and_move() -> None:
    """Whoever gets the blocks of an aborted sequence overwrites what the pending moves put there."""
    setup = FakeSetup(vocab_size=VOCAB, block_tokens=2, num_blocks=24, max_sequences=4, knobs=TREES)
    engine = fake_engine(setup, LAWS, [RandomTrees(VOCAB), ngram()])
    twins = {request.id: alone(request).tokens for request in asked_greedily(40)}
    told: dict[str, list[int]] = {name: [] for name in twins}
    aborted = set()
    for number, request in enumerate(asked_greedily(40)):
        engine.submit(request)
        for _ in range(3):
            for delta in engine.step():
                told[delta.request].extend(delta.tokens)
            engine.check()
        if number % 3 == 0 and engine._parts.scheduler._moves and request.id in engine._sequences:
            engine.abort(request.id)
            aborted.add(request.id)
    while engine.has_work:
        for delta in engine.step():
            told[delta.request].extend(delta.tokens)
        engine.check()
    assert aborted
    for name, tokens in told.items():
        assert tuple(tokens) == twins[name][: len(tokens)]
        assert name in aborted or len(tokens) == len(twins[name])
    assert engine.status.blocks_owned == 0


@pytest.mark.parametrize("rule", ["threshold", "typical"])
def test_lossy_rules_go_down_trees_and_say_so(rule: RuleName) -> None:
    setup = FakeSetup(vocab_size=VOCAB, knobs=replace(TREES, rule=rule))
    drafter = draft_proposer(setup, OTHER_LAWS, branching=Branching(4, 64, 4))
    request = Request("r", (1, 2, 3), Sampling(30, temperature=1.0, ignore_eos=True), Speculation())
    statistics = run(fake_engine(setup, LAWS, [drafter]), [request])["r"].deltas[-1].statistics
    assert statistics.lossy
    assert 0 < statistics.accepted < statistics.drafted


def test_unsound_trees_are_refused() -> None:
    engine = fake_engine(FakeSetup(vocab_size=VOCAB, knobs=TREES), LAWS, [])
    engine.submit(Request("r", (1, 2), Sampling(20, ignore_eos=True)))
    engine.step()
    drafter = RandomTrees(VOCAB)
    view = engine._parts.scheduler.views(engine.knobs)[0]
    sound = replace(drafter._offer(view), tokens=(1, 2, 3), parents=(-1, 0, 0))
    admit = engine._parts.judge.admit
    assert admit([sound]) == [sound]
    sampled = DraftLaw(np.tile(np.arange(VOCAB), (3, 1)), np.full((3, VOCAB), 1 / VOCAB))
    for parents, law in (((-1, 0), None), ((-1, 1, 0), None), ((-1, 0, -2), None), ((-1, 0, 0), sampled)):
        assert admit([replace(sound, parents=parents, law=law)]) == []
    assert admit([replace(sound, tokens=(1,) * 65, parents=(-1,) * 65)]) == []
