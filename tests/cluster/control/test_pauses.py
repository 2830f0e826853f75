"""When a sequence's speculation pauses, and when it probes again."""

from __future__ import annotations

from cluster.control.length import LengthControl
from cluster.messages import Knobs, Plan, PlanRow, Verdict


def told(control: LengthControl, *rounds: tuple[int, int], sequence: int = 0) -> list[bool]:
    """Feed (drafted, accepted) rounds; whether the sequence rests after each."""
    resting = []
    for drafted, accepted in rounds:
        row = PlanRow(sequence, 0, (1,) * (drafted + 1), (), drafts=drafted, wants=drafted + 1)
        knobs = control.update(Plan(1, (row,), control.knobs), [Verdict(sequence, accepted, (1,) * (accepted + 1))])
        resting.append(knobs.caps.get(sequence) == 0)
    return resting


def test_it_pauses_after_fruitless_rounds_and_probes_again() -> None:
    control = LengthControl(Knobs(k=4))
    assert told(control, (4, 0), (1, 0), (1, 0)) == [False, False, True]
    assert told(control, *[(0, 0)] * 4) == [True, True, True, False]
    assert told(control, (1, 0)) == [True]  # the probe failed: a longer pause
    assert told(control, *[(0, 0)] * 8) == [True] * 7 + [False]
    assert told(control, (1, 1)) == [False]


def test_a_pause_never_grows_without_bound() -> None:
    control = LengthControl(Knobs(k=4))
    told(control, (4, 0), (1, 0))
    for _ in range(10):
        told(control, (1, 0))
        pauses = 0
        while control.knobs.caps.get(0) == 0:
            told(control, (0, 0))
            pauses += 1
    assert pauses == 32


def test_success_resets_the_pause() -> None:
    control = LengthControl(Knobs(k=4))
    told(control, (4, 0), (1, 0), (1, 0), *[(0, 0)] * 4, (1, 1), (2, 0), (1, 0), (1, 0))
    assert told(control, *[(0, 0)] * 4) == [True, True, True, False]


def test_rounds_without_drafts_teach_nothing() -> None:
    assert told(LengthControl(Knobs(k=5)), *[(0, 0)] * 9) == [False] * 9


def test_sequences_are_apart_and_forgotten() -> None:
    control = LengthControl(Knobs(k=4))
    told(control, *[(4, 0)] * 3, sequence=1)
    told(control, *[(4, 4)] * 3, sequence=2)
    assert dict(control.knobs.caps) == {1: 0}
    control.forget([1, 77])
    told(control, (4, 4), sequence=2)
    assert not control.knobs.caps


def test_set_keeps_what_was_learned() -> None:
    control = LengthControl(Knobs(k=4))
    told(control, *[(4, 0)] * 3)
    control.set(Knobs(k=6))
    assert control.knobs.k == 6
    assert control.knobs.caps == {0: 0}
