"""How many fruitless rounds pause a request's speculation."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cluster.control.length import LengthControl
from cluster.errors import RequestError
from cluster.messages import Knobs, Plan, PlanRow, Verdict
from cluster.request import Request, Sampling, Speculation
from tests.fakes import FakeSetup, fake_engine
from tests.laws.schedules import LAWS, PROPOSERS, VOCAB, alone


def fruitless_until_paused(control: LengthControl, sequence: int = 0) -> int:
    for times in range(1, 20):
        row = PlanRow(sequence, 0, (1, 1), (), drafts=1, wants=2)
        control.update(Plan(1, (row,), control.knobs), [Verdict(sequence, 0, (1,))])
        if control.knobs.caps.get(sequence, 1) == 0:
            return times
    raise AssertionError("never paused")


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("retries", [3, 5, 8])
def test_that_many_rounds_pause_it(retries: int, adaptive: bool) -> None:
    control = LengthControl(Knobs(k=4, max_retries=retries, adaptive=adaptive))
    assert fruitless_until_paused(control) == retries


def test_the_requests_own_number_goes_first() -> None:
    control = LengthControl(Knobs(k=4, max_retries=3))
    control.open(0, 6)
    control.open(1, None)
    assert fruitless_until_paused(control) == 6
    assert fruitless_until_paused(control, 1) == 3


def test_turned_while_running() -> None:
    control = LengthControl(Knobs(k=4, max_retries=8))
    control.open(0, None)
    control.set(Knobs(k=4, max_retries=4))
    assert fruitless_until_paused(control) == 4


@pytest.mark.parametrize("retries", [0, 2, 9])
def test_other_numbers_are_refused_by_name(retries: int) -> None:
    with pytest.raises(RequestError, match=r"speculation\.max_retries") as refused:
        Speculation(max_retries=retries)
    assert refused.value.param == "speculation.max_retries"


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_request_pauses_probes_and_goes_on(adaptive: bool) -> None:
    """A drafter that always errs, until the middle of the answer."""
    setup = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=2, adaptive=adaptive))
    request = Request("r", (1, 2, 3), Sampling(60, temperature=0.0, ignore_eos=True), Speculation(max_retries=5))
    twin = alone(request)
    half = [(token + 1) % VOCAB for token in twin.tokens[:30]] + list(twin.tokens[30:])
    engine = fake_engine(setup, LAWS, PROPOSERS["oracle"](setup, {request.prompt: half}))
    engine.submit(request)
    drafted, tokens = [0], []
    while engine.has_work:
        (news,) = engine.step()
        drafted.append(news.statistics.drafted)
        tokens.extend(news.tokens)
    did = [after > before for before, after in pairwise(drafted)]
    # The first step is the prompt's; then five tries, a pause of four rounds, and one probe at a time.
    assert did[:11] == [False, *[True] * 5, *[False] * 4, True]
    assert did[11:19] == [False] * 8
    assert sum(did[-8:]) > 4
    assert tuple(tokens) == twin.tokens
