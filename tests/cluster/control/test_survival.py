"""How likely drafts are to stand: what is learned tends to the truth, by place, by source and by sequence."""

from __future__ import annotations

import random

import pytest

from cluster.control.survival import Kind, Survival
from cluster.messages import PlanRow, Verdict

COPY = Kind("ngram")


def chain(survival: Survival, sequence: int, drafted: int, accepted: int, kind: Kind = COPY) -> None:
    row = PlanRow(sequence, 0, (1,) * (drafted + 1), (), drafts=drafted, wants=drafted + 1)
    survival.settle(kind, row, Verdict(sequence, accepted, (1,) * (accepted + 1)))


def drawn(chances: list[float], coin: random.Random) -> int:
    return next((place for place, chance in enumerate(chances) if coin.random() > chance), len(chances))


def test_chances_by_place_are_learned() -> None:
    truth, coin = [0.4, 0.8, 0.95, 0.5], random.Random(0)
    survival = Survival()
    for number in range(4000):
        chain(survival, number, 4, drawn(truth, coin))
    alive = 1.0
    for place, found in enumerate(survival.chain(99_999, COPY, 4)):
        alive *= truth[place]
        assert found == pytest.approx(alive, abs=0.15)  # a new sequence is welcomed with a little more


def test_a_sequence_of_its_own_kind_is_told_apart() -> None:
    coin = random.Random(1)
    survival = Survival()
    for _ in range(400):
        chain(survival, 1, 4, drawn([0.9] * 4, coin))
        chain(survival, 2, 4, drawn([0.3] * 4, coin))
    good, bad = survival.chain(1, COPY, 4), survival.chain(2, COPY, 4)
    assert good[0] > 0.75 > 0.5 > bad[0]
    assert good[3] > 5 * bad[3]


def test_chances_never_rise_and_the_first_guess_is_hopeful() -> None:
    survival = Survival()
    fresh = survival.chain(0, COPY, 8)
    assert fresh == sorted(fresh, reverse=True)
    assert fresh[0] > 0.7
    nodes = survival.tree(0, Kind("suffix", tree=True), 8)
    assert nodes == sorted(nodes, reverse=True)


def test_an_answer_that_ended_inside_its_drafts_failed_none() -> None:
    survival = Survival()
    row = PlanRow(0, 0, (1,) * 5, (), drafts=4, wants=5)
    for _ in range(50):
        survival.settle(COPY, row, Verdict(0, 2, (1, 1)))  # two stood, the second ended the answer
    first, second, *_ = survival.chain(0, COPY, 4)
    assert first > 0.95
    assert second > 0.9


def test_nodes_of_a_tree_have_chances_of_their_own() -> None:
    survival, kind = Survival(), Kind("suffix", tree=True)
    row = PlanRow(0, 0, (1,) * 4, (), drafts=3, wants=4, parents=(-1, 0, -1))
    for turn in range(600):
        path = (0, 1) if turn % 3 else (2,)
        survival.settle(kind, row, Verdict(0, len(path), (1,) * (len(path) + 1), path=path))
    first, second, third = survival.tree(1, kind, 3)
    assert second == pytest.approx(first, abs=0.01)  # it stands whenever the first does
    assert 0.3 < third < 0.6 < first


def test_what_was_held_against_a_sequence_fades_while_it_rests() -> None:
    survival = Survival()
    for sequence in range(100):
        chain(survival, sequence, 4, 3)
    for _ in range(30):
        chain(survival, 7, 4, 0)
    before = survival.chain(7, COPY, 1)[0]
    for _ in range(300):
        survival.idle(7)
    assert survival.chain(7, COPY, 1)[0] > 2 * before
    survival.forget(7)
    assert survival.chain(7, COPY, 1)[0] > 2 * before


def test_sources_and_lengths_are_apart() -> None:
    survival = Survival()
    for _ in range(200):
        chain(survival, 0, 2, 0, Kind("suffix", bucket=2))
        chain(survival, 1, 2, 2, Kind("suffix", bucket=4))
    assert survival.chain(2, Kind("suffix", bucket=2), 1)[0] < 0.4
    assert survival.chain(2, Kind("suffix", bucket=4), 1)[0] > 0.9
