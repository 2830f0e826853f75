"""Drafting ahead: guesses where outcomes are likely, the next draft there at once, and never another token."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.draft.guessing import AllAccepted, FanOut
from cluster.draft.lookahead import Lookahead, Pearl
from cluster.draft.proposer import Proposer
from cluster.draft.remote import RemoteProposer
from cluster.draft.server import DraftServer, Sync
from cluster.errors import ConfigError
from cluster.messages import Knobs
from cluster.request import Request, Sampling
from tests.cluster.draft.test_remote import faults
from tests.fakes import FakeRunner, FakeSetup, HashedLaws, draft_proposer, fake_engine, ngram, run
from tests.laws.schedules import LAWS, OTHER_LAWS, VOCAB, alone
from tests.remote import MakeStrategy, pumped, remote, timeless

SETUP = FakeSetup(vocab_size=VOCAB, num_blocks=300, knobs=Knobs(k=4, token_budget=64, adaptive=False))
ASKED = [
    Request(f"r{n}", tuple((n + i) % VOCAB for i in range(n + 1)), Sampling(24, seed=n, ignore_eos=True))
    for n in range(5)
] + [Request("greedy", (1, 2), Sampling(24, temperature=0.0, ignore_eos=True))]
TWINS = {request.id: alone(request).tokens for request in ASKED}


class Ahead:
    """Makes strategies, and keeps them."""

    def __init__(self, kind: type[Lookahead] = Lookahead) -> None:
        self.kind = kind
        self.made: list[Lookahead] = []

    def __call__(self, proposer: Proposer) -> Lookahead:
        self.made.append(self.kind(proposer, clock=lambda: 0.0))
        return self.made[-1]


def drafter(law_of: HashedLaws = OTHER_LAWS) -> Proposer:
    return draft_proposer(SETUP, law_of, num_blocks=3000)


def told(*proposers: Proposer) -> dict[str, tuple[int, ...]]:
    return {name: answer.tokens for name, answer in run(fake_engine(SETUP, LAWS, proposers), ASKED).items()}


def test_guesses_are_dealt_as_theorem_12_says() -> None:
    widths = FanOut().widths(0.8, 7, 24)
    assert sum(widths) == 24
    exact = (3.9, 3.5, 3.1, 2.8, 2.5, 2.2, 2.0, 4.0)
    assert all(abs(width - share) < 1 for width, share in zip(widths, exact, strict=True))
    assert sorted(widths[:-1], reverse=True) == list(widths[:-1])
    assert FanOut().widths(0.8, 0, 5) == (5,)
    assert FanOut().widths(0.9, 7, 24)[-1] > widths[-1]


@given(st.floats(0, 1), st.integers(0, 15), st.integers(1, 64))
def test_a_budget_is_spent_and_never_more(alpha: float, length: int, budget: int) -> None:
    widths = FanOut().widths(alpha, length, budget)
    assert len(widths) == length + 1
    assert sum(widths) == budget
    assert min(widths) >= 0
    assert AllAccepted().widths(alpha, length, budget) == (0,) * length + (1,)


@pytest.mark.parametrize("kind", [Lookahead, Pearl])
def test_a_draft_like_the_target_is_always_foreseen(kind: type[Lookahead]) -> None:
    ahead = Ahead(kind)
    far = remote(drafter(LAWS), strategy=ahead)
    assert told(far) == TWINS
    assert far.stats.hit_rate == 1.0
    assert ahead.made[0].stats.misses == 0
    assert ahead.made[0].stats.alpha > 0.9


def test_what_is_foreseen_is_the_draft_that_would_have_been_made() -> None:
    """Under `coupled` the noise is of the positions: a path guessed right is what drafting afterwards gives."""
    engines = [fake_engine(SETUP, LAWS, [remote(drafter(), strategy=strategy)]) for strategy in (Ahead(), Sync)]
    for engine in engines:
        run(engine, ASKED)
    offered = [
        {
            (row.offer.sequence, row.offer.base_len): row.offer.tokens
            for plan in engine._parts.runner.plans
            for row in plan.rows
            if row.offer is not None
        }
        for engine in engines
    ]
    common = offered[0].keys() & offered[1].keys()
    assert len(common) > 20
    for key in common:
        ahead, after = offered[0][key], offered[1][key]
        assert ahead[: len(after)] == after[: len(ahead)]


def test_many_guesses_foresee_more_than_one() -> None:
    rates = {}
    for kind in (Lookahead, Pearl):
        ahead = Ahead(kind)
        assert told(remote(drafter(), strategy=ahead)) == TWINS
        rates[kind] = ahead.made[0].stats.hit_rate
    assert rates[Lookahead] > 0.9 > rates[Pearl] > 0.1  # six tokens: 24 guesses leave little out


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(faults, st.integers(0, 99), st.integers(1, 3), st.integers(1, 8), st.sampled_from((Lookahead, Pearl)))
def test_any_channel_gives_the_same_tokens(
    wrong: object, seed: int, drafters: int, steps: int, strategy: MakeStrategy
) -> None:
    inner = [drafter(LAWS if n else OTHER_LAWS) for n in range(drafters)]
    assert told(remote(*inner, strategy=timeless(strategy), faults=wrong, seed=seed, steps=steps), ngram()) == TWINS


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_under_a_rule_that_reads_laws_every_offer_brings_its_own(rule: str) -> None:
    setup = FakeSetup(vocab_size=VOCAB, num_blocks=300, knobs=Knobs(k=4, rule=rule, token_budget=64, adaptive=False))
    ahead = Ahead()
    engine = fake_engine(setup, LAWS, [remote(drafter(), strategy=ahead)])
    run(engine, ASKED)
    offers = [row.offer for plan in engine._parts.runner.plans for row in plan.rows if row.offer is not None]
    for offer in offers:
        if offer.sequence != 5:  # the greedy one
            assert len(offer.law.ids) == len(offer.law.probs) == len(offer.tokens)
    assert ahead.made[0].stats.hits > 10


def test_paths_leave_with_their_sequence() -> None:
    proposer = drafter()
    server = DraftServer(proposer, Lookahead(proposer))
    far = RemoteProposer("model", wait_s=0.0)
    channel = pumped(server)
    far.attach(channel)
    assert told(far) == TWINS
    channel.poll()
    assert server.sequences == 0
    assert not proposer._states
    assert proposer._cache.counts.owned == 0
    proposer._cache.check()


def test_new_weights_forget_what_the_old_ones_foresaw() -> None:
    proposer = drafter()
    server = DraftServer(proposer, Lookahead(proposer), version=1)
    far = RemoteProposer("model", wait_s=0.0)
    far.attach(pumped(server))
    engine = fake_engine(SETUP, LAWS, [far])
    for request in ASKED:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in ASKED}
    for step in range(1000):
        if step == 3:
            server.swap(FakeRunner(LAWS, VOCAB, 3000, SETUP.block_tokens), 2)
        for delta in engine.step():
            tokens[delta.request].extend(delta.tokens)
        if not engine.has_work:
            break
    assert {name: tuple(told) for name, told in tokens.items()} == TWINS
    versions = [row.offer.version for plan in engine._parts.runner.plans for row in plan.rows if row.offer is not None]
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}


def test_a_proposer_that_cannot_look_ahead_says_so() -> None:
    with pytest.raises(ConfigError, match="mode sync"):
        Lookahead(ngram())
