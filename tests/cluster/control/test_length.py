"""How many tokens to draft."""

from __future__ import annotations

from cluster.control.length import LengthControl
from cluster.messages import Knobs, Plan, PlanRow, Verdict


def told(control: LengthControl, *rounds: tuple[int, int], sequence: int = 0) -> list[int]:
    """Feed (drafted, accepted) rounds; the cap after each."""
    caps = []
    for drafted, accepted in rounds:
        row = PlanRow(sequence, 0, (1,) * (drafted + 1), (), drafts=drafted, wants=drafted + 1)
        knobs = control.update(Plan(1, (row,), control.knobs), [Verdict(sequence, accepted, (1,))])
        caps.append(knobs.caps[sequence])
    return caps


def test_it_starts_at_k_and_follows_what_stood() -> None:
    assert told(LengthControl(Knobs(k=8)), (8, 8), (8, 3), (4, 0), (1, 1), (2, 2), (4, 4)) == [8, 4, 1, 2, 4, 8]


def test_it_pauses_after_fruitless_rounds_and_probes_again() -> None:
    control = LengthControl(Knobs(k=4))
    assert told(control, (4, 0), (1, 0), (1, 0)) == [1, 1, 0]
    assert told(control, *[(0, 0)] * 4) == [0, 0, 0, 1]
    assert told(control, (1, 0)) == [0]  # the probe failed: a longer pause
    assert told(control, *[(0, 0)] * 8) == [0] * 7 + [1]
    assert told(control, (1, 1)) == [2]


def test_a_pause_never_grows_without_bound() -> None:
    control = LengthControl(Knobs(k=4))
    told(control, (4, 0), (1, 0))
    for _ in range(10):
        told(control, (1, 0))
        pauses = 0
        while control.knobs.caps[0] == 0:
            told(control, (0, 0))
            pauses += 1
    assert pauses == 32


def test_success_resets_the_pause() -> None:
    control = LengthControl(Knobs(k=4))
    told(control, (4, 0), (1, 0), (1, 0), *[(0, 0)] * 4, (1, 1), (2, 0), (1, 0), (1, 0))
    assert told(control, *[(0, 0)] * 4) == [0, 0, 0, 1]


def test_rounds_without_drafts_teach_nothing() -> None:
    assert told(LengthControl(Knobs(k=5)), (0, 0), (0, 0), (0, 0), (0, 0)) == [5, 5, 5, 5]


def test_sequences_are_apart_and_forgotten() -> None:
    control = LengthControl(Knobs(k=4))
    told(control, (4, 0), sequence=1)
    told(control, (4, 4), sequence=2)
    assert dict(control.knobs.caps) == {1: 1, 2: 4}
    control.forget([1, 77])
    told(control, (4, 4), sequence=2)
    assert dict(control.knobs.caps) == {2: 4}


def test_not_adaptive_has_no_caps() -> None:
    control = LengthControl(Knobs(k=4))
    told(control, (4, 0))
    control.set(Knobs(k=4, adaptive=False))
    assert not control.knobs.caps
    row = PlanRow(0, 0, (1, 1), (), drafts=1, wants=2)
    assert not control.update(Plan(1, (row,), control.knobs), [Verdict(0, 0, (1,))]).caps


def test_set_keeps_what_was_learned() -> None:
    control = LengthControl(Knobs(k=4))
    told(control, (4, 0))
    control.set(Knobs(k=6))
    assert control.knobs.k == 6
    assert control.knobs.caps == {0: 1}
    assert told(control, (1, 1), (2, 2), (4, 4)) == [2, 4, 6]


def test_first_seen_at_zero_it_may_draft_later() -> None:
    control = LengthControl(Knobs(k=0))
    told(control, (0, 0))
    control.set(Knobs(k=4))
    assert control.knobs.caps[0] >= 1
    assert told(control, (1, 1), (2, 2)) == [2, 4]
