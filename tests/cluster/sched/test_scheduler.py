"""What the next step computes, driven without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.errors import BrokenInvariant, Overloaded
from cluster.kv.blocks import BlockPool
from cluster.kv.cache import KVCache
from cluster.kv.keys import KeyContext
from cluster.messages import Knobs, Offer, Plan, PlanRow, Verdict
from cluster.request import Request, Sampling, Speculation
from cluster.sched.scheduler import Limits, Scheduler

KNOBS = Knobs(k=3, token_budget=16, adaptive=False)


def scheduler(blocks: int = 40, block_tokens: int = 4, running: int = 4, waiting: int = 8) -> Scheduler:
    cache = KVCache(BlockPool(blocks), block_tokens, KeyContext("m"), prefix=False)
    return Scheduler(cache, Limits(running, waiting))


def ask(length: int, *, max_tokens: int = 20, **speculation: int) -> Request:
    return Request("r", tuple(range(length)), Sampling(max_tokens), Speculation(**speculation))


def offer(sequence: int, base_len: int, count: int = 3) -> Offer:
    return Offer(sequence, base_len, (9,) * count)


def verdicts(plan: Plan, accept: bool = False) -> list[Verdict]:
    return [
        Verdict(row.sequence, row.drafts if accept else 0, (9,) * ((row.drafts if accept else 0) + 1))
        for row in plan.rows
        if row.wants
    ]


def step(made: Scheduler, *offers: Offer, knobs: Knobs = KNOBS, accept: bool = False) -> dict[int, PlanRow]:
    plan = made.plan(offers, knobs)
    assert plan.num_tokens <= knobs.token_budget
    made.commit(plan, verdicts(plan, accept))
    made.check()
    return {row.sequence: row for row in plan.rows}


def test_a_prompt_is_filled_in_chunks_of_the_budget() -> None:
    made = scheduler()
    made.add(ask(40))
    rows = [step(made)[0] for _ in range(4)]
    assert [(row.first, len(row.tokens), row.wants) for row in rows] == [
        (0, 16, 0),
        (16, 16, 0),
        (32, 8, 1),
        (40, 1, 1),
    ]


def test_rounds_never_repeat() -> None:
    made = scheduler()
    made.add(ask(3))
    assert [made.plan((), KNOBS).round for _ in range(1)] == [1]
    assert made.plan((), KNOBS).round == 2


@pytest.mark.parametrize("budget", [1, 2, 3])
@pytest.mark.parametrize("k", [0, 4])
def test_the_smallest_budgets_move_everyone_on(budget: int, k: int) -> None:
    """k + 1 above the budget, prompts above the budget, one token a step."""
    made = scheduler(running=3)
    ids = [made.add(ask(5)) for _ in range(3)]
    seen: dict[int, int] = dict.fromkeys(ids, 0)
    for _ in range(80):
        offers = [offer(view.id, len(view.tokens), view.k) for view in made.views(Knobs(k=k)) if view.k]
        for row in step(made, *offers, knobs=Knobs(k=k, token_budget=budget, adaptive=False)).values():
            seen[row.sequence] += bool(row.wants)
    assert seen[0] > 0
    if budget >= 3:
        assert all(seen.values())


def test_one_at_a_time_takes_turns_in_order() -> None:
    made = scheduler(running=1)
    first, second = made.add(ask(3)), made.add(ask(3))
    for _ in range(5):
        assert list(step(made)) == [first]
    made.abort(first)
    assert list(step(made)) == [second]


def test_drafts_ride_only_on_rows_that_are_up_to_date() -> None:
    made = scheduler()
    made.add(ask(20))
    assert step(made, offer(0, 20))[0].drafts == 0
    assert step(made, offer(0, 20))[0].drafts == 0  # the rest of the prompt
    row = step(made, offer(0, 21))[0]
    assert (row.drafts, row.wants, row.tokens[-3:]) == (3, 4, (9, 9, 9))


@pytest.mark.parametrize(
    ("length", "speculation", "knobs", "drafts"),
    [
        (5, {}, KNOBS, 3),
        (5, {"k": 2}, KNOBS, 2),
        (5, {"k": 0}, KNOBS, 0),
        (5, {"k": 9}, KNOBS, 3),
        (5, {"enabled": False}, KNOBS, 0),
        (5, {}, replace(KNOBS, k=0), 0),
        (5, {}, replace(KNOBS, caps={0: 1}), 1),
        (5, {}, replace(KNOBS, caps={7: 1}), 3),
        (5, {}, replace(KNOBS, caps={0: 9}), 3),
        (5, {}, replace(KNOBS, token_budget=3), 2),
        (5, {}, replace(KNOBS, token_budget=1), 0),
    ],
)
def test_the_least_of_all_limits_cuts_an_offer(
    length: int, speculation: dict[str, int], knobs: Knobs, drafts: int
) -> None:
    made = scheduler()
    made.add(ask(length, **speculation))
    step(made)
    assert step(made, offer(0, length + 1, 8), knobs=knobs)[0].drafts == drafts


def test_drafts_stop_one_short_of_the_room_left() -> None:
    """The last token is the target's own, so drafting it would be wasted."""
    made = scheduler()
    made.add(ask(5, max_tokens=3))
    step(made)
    assert made.view(0, KNOBS).room == 2
    assert made.view(0, KNOBS).k == 1
    assert step(made, offer(0, 6))[0].drafts == 1
    assert made.views(KNOBS) == []


def test_drafts_leave_room_for_rows_behind_and_for_a_newcomer() -> None:
    made = scheduler()
    for _ in range(3):
        made.add(ask(2))
    step(made)
    rows = step(made, *(offer(n, 3) for n in range(3)), knobs=replace(KNOBS, token_budget=6))
    assert [rows[n].drafts for n in range(3)] == [3, 0, 0]
    made.add(ask(2))
    assert 3 in step(made, *(offer(n, 4) for n in range(3)), knobs=replace(KNOBS, token_budget=6))


def test_accepted_and_rejected_are_counted_where_they_stood() -> None:
    made = scheduler()
    made.add(ask(4))
    step(made)
    plan = made.plan([offer(0, 5)], KNOBS)
    made.commit(plan, [Verdict(0, 2, (9, 9, 8))])
    (delta,) = made.commit(made.plan((), KNOBS), [Verdict(0, 0, (1,), finish="stop")])
    told = delta.statistics
    assert (told.rounds, told.drafted, told.accepted, told.output_tokens) == (3, 3, 2, 5)
    assert (told.drafted_by_position, told.accepted_by_position) == ((1, 1, 1), (1, 1, 0))
    assert made.running == 0


def test_without_blocks_drafts_go_first_then_the_newest() -> None:
    made = scheduler(blocks=4, block_tokens=4)
    old, new = made.add(ask(7, max_tokens=9)), made.add(ask(3, max_tokens=9))
    step(made)
    assert made.running == 2
    rows = step(made, offer(old, 8), offer(new, 4))  # blocks 2 + 1, one more free: taken by the older's drafts
    assert (rows[old].drafts, rows[new].drafts) == (3, 0)
    for _ in range(8):
        step(made)
        if made.running == 1:
            break
    assert [view.id for view in made.views(KNOBS)] == [old]
    assert made.waiting == 1
    made.abort(old)
    assert list(step(made)) == [new]
    assert made.view(new, KNOBS).prompt_len == 3


def test_a_newcomer_leaves_a_block_to_everyone_running() -> None:
    made = scheduler(blocks=3, block_tokens=4)
    made.add(ask(4, max_tokens=4))
    made.add(ask(5, max_tokens=4))
    assert list(step(made)) == [0]
    assert made.waiting == 1


def test_the_queue_has_an_end() -> None:
    made = scheduler(running=2, waiting=3)
    for _ in range(5):
        made.add(ask(3))
    with pytest.raises(Overloaded, match="max_waiting=3"):
        made.add(ask(3))
    step(made)
    assert (made.running, made.waiting) == (2, 3)
    with pytest.raises(Overloaded):
        made.add(ask(3))
    made.abort(0)
    assert made.add(ask(3)) == 5


def test_abort_waiting_running_and_unknown() -> None:
    made = scheduler(running=1)
    made.add(ask(3))
    made.add(ask(3))
    step(made)
    made.abort(1)
    made.abort(0)
    made.abort(0)
    made.abort(99)
    assert (made.running, made.waiting) == (0, 0)
    assert made.plan((), KNOBS).rows == ()
    made.check()


@pytest.mark.parametrize("said", [[], [Verdict(0, 0, ())], [Verdict(0, 1, (1,))]])
def test_verdicts_that_do_not_fit_the_plan_are_named(said: list[Verdict]) -> None:
    made = scheduler()
    made.add(ask(3))
    with pytest.raises(BrokenInvariant):
        made.commit(made.plan((), KNOBS), said)


def test_a_sequence_that_is_not_live_has_no_view() -> None:
    with pytest.raises(BrokenInvariant, match="not live"):
        scheduler().view(3, KNOBS)
