"""Drafts from behind channels: the same tokens whatever channels and drafters do; offers wherever they can be."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.draft.remote import RemoteProposer
from cluster.draft.server import DraftServer, Sync
from cluster.draft.verbs import LANGUAGE, Answer
from cluster.errors import ConfigError
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.parallel.channel import local_pair
from cluster.request import Request, Sampling, Speculation
from tests.fakes import FakeRunner, FakeSetup, draft_proposer, fake_engine, ngram, run
from tests.laws.schedules import LAWS, OTHER_LAWS, VOCAB, alone
from tests.remote import NONE, Faults, pumped, remote

SETUP = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=4, token_budget=64, adaptive=False))
ASKED = [
    Request(f"r{n}", tuple((n + i) % VOCAB for i in range(n + 1)), Sampling(24, seed=n, ignore_eos=True))
    for n in range(6)
]
TWINS = {request.id: alone(request).tokens for request in ASKED}


def told(*proposers: object) -> dict[str, tuple[int, ...]]:
    return {name: answer.tokens for name, answer in run(fake_engine(SETUP, LAWS, proposers), ASKED).items()}


def server(law_of: object = LAWS, version: int = 0) -> DraftServer:
    proposer = draft_proposer(SETUP, law_of, num_blocks=300)
    return DraftServer(proposer, Sync(proposer), version)


def test_behind_a_sound_channel_a_drafter_does_what_it_does_here() -> None:
    far = remote(draft_proposer(SETUP, LAWS))
    engine, twin = fake_engine(SETUP, LAWS, [far]), fake_engine(SETUP, LAWS, [draft_proposer(SETUP, LAWS)])
    assert run(engine, ASKED) == run(twin, ASKED)
    assert far.stats.hits > 0
    assert far.stats.hit_rate == 1.0
    assert (far.stats.late, far.stats.stale, far.stats.doubled, far.stats.lost) == (0, 0, 0, 0)


def test_tokens_travel_once() -> None:
    here = server()
    channel = pumped(here)
    sent: list[bytes] = []
    send = channel.send
    channel.send = lambda message: (sent.append(message), send(message))[1]  # type: ignore[method-assign]
    far = RemoteProposer("model", wait_s=0.0)
    far.attach(channel)
    prompt = tuple(n % VOCAB for n in range(90))
    setup = replace(SETUP, max_context=256, num_blocks=80)
    run(fake_engine(setup, LAWS, [far]), [Request("r", prompt, Sampling(30, seed=3, ignore_eos=True))])
    assert sum(len(message) > 8 * len(prompt) for message in sent) == 1


faults = st.builds(
    Faults,
    lose=st.sampled_from((0.0, 0.2, 0.6)),
    double=st.sampled_from((0.0, 0.4)),
    delay=st.sampled_from((0.0, 0.3, 0.8)),
    swap=st.sampled_from((0.0, 0.5)),
    most=st.integers(1, 12),
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(faults, st.integers(0, 99), st.integers(1, 3), st.integers(1, 50))
def test_any_channel_gives_the_same_tokens(wrong: Faults, seed: int, drafters: int, steps: int) -> None:
    inner = [draft_proposer(SETUP, LAWS if n else OTHER_LAWS) for n in range(drafters)]
    assert told(remote(*inner, faults=wrong, seed=seed, steps=steps), ngram()) == TWINS


@pytest.mark.parametrize("seed", range(4))
def test_every_fault_is_met_and_counted(seed: int) -> None:
    far = remote(draft_proposer(SETUP, LAWS), faults=Faults(lose=0.1, double=0.4, delay=0.4, swap=0.3), seed=seed)
    assert told(far) == TWINS
    assert far.stats.hits > 0
    assert far.stats.missed > 0
    assert far.stats.late + far.stats.doubled > 0


def test_after_the_channel_heals_nothing_is_missed_or_kept() -> None:
    """Whatever was lost, a drafter that is asked again gets the whole; whatever came late is not kept for ever."""
    here = server()
    channel = pumped(here, Faults(lose=0.5, delay=0.5), seed=5)
    far = RemoteProposer("model", wait_s=0.0)
    far.attach(channel)
    engine = fake_engine(SETUP, LAWS, [far])
    assert {name: answer.tokens for name, answer in run(engine, ASKED).items()} == TWINS
    channel.here.faults = channel.there.faults = NONE
    before = far.stats
    assert {name: answer.tokens for name, answer in run(engine, ASKED).items()} == TWINS
    after = far.stats
    assert after.hits - before.hits > 0.9 * sum(len(tokens) for tokens in TWINS.values()) / (SETUP.knobs.k + 1)
    channel.poll()  # what was said last crosses
    assert here.sequences == 0


def test_a_lost_drafter_costs_speed_and_its_sequences_go_to_the_others() -> None:
    first, second = server(), server()
    channels = [pumped(first), pumped(second)]
    far = RemoteProposer("model", wait_s=0.0)
    for channel in channels:
        far.attach(channel)
    engine = fake_engine(SETUP, LAWS, [far])
    for request in ASKED:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in ASKED}
    spread: list[tuple[int, int]] = []
    for step in range(1000):
        if step == 2:
            spread.append((first.sequences, second.sequences))
            first.close()
        if step == 4:
            spread.append((first.sequences, second.sequences))
            second.close()
        if step == 6:
            assert far.drafters == 0
            third = server()
            far.attach(pumped(third))
        if step == 8:
            spread.append((third.sequences, far.stats.hits))
        for delta in engine.step():
            tokens[delta.request].extend(delta.tokens)
        if not engine.has_work:
            break
    assert {name: tuple(told) for name, told in tokens.items()} == TWINS
    assert spread[0] == (3, 3)
    assert spread[1] == (0, 6)
    assert spread[2][0] > 0
    assert (far.stats.lost, far.stats.attached) == (2, 3)


def test_a_row_that_names_another_method_is_not_shown() -> None:
    here = server()
    far = RemoteProposer("model", wait_s=0.0)
    far.attach(pumped(here))
    asked = [replace(ASKED[3], speculation=Speculation(method="ngram"))]
    run(fake_engine(SETUP, LAWS, [far, ngram()]), asked)
    assert far.stats.hits + far.stats.missed + far.stats.nothing == 0


def test_one_drafter_serves_several_verifiers() -> None:
    here = server()
    engines = []
    for _ in range(3):
        far = RemoteProposer("model", wait_s=0.0)
        far.attach(pumped(here))
        engines.append((far, fake_engine(SETUP, LAWS, [far])))
    tokens: list[dict[str, list[int]]] = [{request.id: [] for request in ASKED} for _ in engines]
    for _, engine in engines:
        for request in ASKED:
            engine.submit(request)
    while any(engine.has_work for _, engine in engines):
        for heard, (_, engine) in zip(tokens, engines, strict=True):
            for delta in engine.step():
                heard[delta.request].extend(delta.tokens)
    for heard, (far, _) in zip(tokens, engines, strict=True):
        assert {name: tuple(told) for name, told in heard.items()} == TWINS
        assert far.stats.hit_rate == 1.0
    assert here.verifiers == 3


def test_weights_are_swapped_between_rounds_and_older_offers_dropped() -> None:
    here = server(OTHER_LAWS, version=1)
    ours, theirs = local_pair()
    here.attach(theirs)
    far = RemoteProposer("model", wait_s=0.0)
    far.attach(ours)
    view = SequenceView(0, [1, 2, 3], 3, 2, Sampling(20, temperature=0.0), "coupled", "", None, 4, 20)
    knobs = Knobs()

    def offered() -> list[Offer]:
        far.propose([view], knobs)
        here.step()
        return far.propose([view], knobs)

    far.open(view)
    (old,) = offered()
    assert old.version == 1
    runner = FakeRunner(LAWS, VOCAB, SETUP.num_blocks, SETUP.block_tokens)
    with pytest.raises(ConfigError, match="not newer"):
        here.swap(runner, 1)
    here.swap(runner, 2)
    view.tokens.append(0)
    (new,) = offered()
    assert new.version == 2
    context = list(view.tokens)
    for token in new.tokens:
        assert token == int(LAWS(context).argmax())
        context.append(token)
    view.tokens.append(1)
    theirs.send(LANGUAGE.encode(Answer(9, 1, (Offer(0, 5, (3, 3), version=1),), ())))
    assert all(offer.version == 2 for offer in far.propose([view], knobs))
    assert far.stats.stale == 1


def test_a_proposer_without_weights_has_none_to_swap() -> None:
    inner = ngram()
    with pytest.raises(ConfigError, match="no weights"):
        DraftServer(inner, Sync(inner)).swap(FakeRunner(LAWS, VOCAB, 4, 4), 2)


def test_what_is_no_message_costs_the_drafter_its_place() -> None:
    ours, theirs = local_pair()
    far = RemoteProposer("model", wait_s=0.0)
    far.attach(ours)
    theirs.send(b"hello there")
    assert told(far) == TWINS
    assert (far.drafters, far.stats.lost) == (0, 1)


class Slow:
    """Another proposer that thinks for a while."""

    samples: ClassVar[bool] = False

    def __init__(self, inner: object, gate: threading.Event) -> None:
        self._inner, self._gate, self.name = inner, gate, inner.name

    def open(self, view: SequenceView) -> None:
        self._inner.open(view)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        self._gate.wait(10)
        return self._inner.propose(views, knobs)

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        self._inner.settle(verdicts)

    def close(self, sequence: int) -> None:
        self._inner.close(sequence)


def test_a_slow_drafter_is_waited_for_no_longer_than_said() -> None:
    gate, stop = threading.Event(), threading.Event()
    inner = Slow(draft_proposer(SETUP, LAWS), gate)
    here = DraftServer(inner, Sync(inner))
    ours, theirs = local_pair()
    here.attach(theirs)
    thread = threading.Thread(target=here.run, args=(stop,))
    thread.start()
    try:
        far = RemoteProposer("model", wait_s=0.02)
        far.attach(ours)
        engine = fake_engine(SETUP, LAWS, [far])
        engine.submit(ASKED[2])
        for _ in range(3):
            engine.step()
        assert far.stats.hits == 0
        assert far.stats.missed > 0
        gate.set()
        far.wait_s = 10.0
        while engine.has_work:
            engine.step()
        assert far.stats.hits > 0
    finally:
        gate.set()
        stop.set()
        thread.join(5)
    assert not thread.is_alive()
