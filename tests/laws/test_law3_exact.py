"""Law 3: every exact rule follows the target's law with every proposer, and the test can tell.

Each pair of rule and proposer draws over 100,000 tokens through the whole engine. Each pair is
also run with planted faults, for which the same test has to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar

import numpy as np
import pytest

from cluster.draft.proposer import Proposer
from cluster.messages import DraftLaw, Knobs, Offer, SequenceView, Verdict
from cluster.model.sample import noise_key, uniform
from cluster.request import Request, RuleName, Sampling
from cluster.verify import judge
from cluster.verify.rules import base
from cluster.verify.rules.base import ACCEPT_STREAM, RECOVER_STREAM, Facts, Ruling
from tests.fakes import FakeSetup, Liar, OracleProposer, SampledProposer, draft_proposer, fake_engine, ngram, run
from tests.laws.chi_square import LEAST_P, SPAN, ChainLaws, windows_p_value
from tests.rulings import plant

VOCAB = 4
# Two tokens are likely after each, so that a rejected draft leaves a choice; the drafters' laws are flatter.
TARGET = ChainLaws(
    ((0.12, 0.40, 0.36, 0.12), (0.10, 0.14, 0.40, 0.36), (0.36, 0.12, 0.12, 0.40), (0.40, 0.36, 0.14, 0.10))
)
DRAFT = ChainLaws(
    ((0.22, 0.30, 0.28, 0.20), (0.20, 0.24, 0.30, 0.26), (0.28, 0.20, 0.22, 0.30), (0.30, 0.28, 0.20, 0.22))
)
Q = (0.25, 0.22, 0.28, 0.25)  # of the drafters that always sample one law
WRONG_Q = (0.4, 0.3, 0.2, 0.1)  # and what they claim when told to lie
TEMPERATURE = 0.8
ANSWER = 8 * SPAN
PROMPT = 8  # digits to base VOCAB of the request's number, so that the oracle can tell requests apart
FULL = 4_200  # answers; x ANSWER = 100,800 draws
PLANTED = 400

SETUP = FakeSetup(
    vocab_size=VOCAB,
    block_tokens=8,
    num_blocks=400,
    max_sequences=64,
    max_waiting=FULL,
    eos_ids=frozenset(),
    prefix=False,
    knobs=Knobs(k=3, token_budget=4096, adaptive=False, max_retries=8),  # pauses would hide planted faults
)

MakeProposers = Callable[[], Sequence[Proposer]]
Answers = list[tuple[int, tuple[int, ...]]]


def requests(count: int) -> list[Request]:
    return [
        Request(
            id=str(number),
            prompt=tuple(number // VOCAB**digit % VOCAB for digit in range(PROMPT)),
            sampling=Sampling(max_tokens=ANSWER, temperature=TEMPERATURE, seed=number),
        )
        for number in range(count)
    ]


def answers(rule: RuleName, proposers: Sequence[Proposer], count: int) -> Answers:
    setup = replace(SETUP, knobs=replace(SETUP.knobs, rule=rule))
    asked = requests(count)
    told = run(fake_engine(setup, TARGET, proposers), asked)
    return [(request.prompt[-1], told[request.id].tokens) for request in asked]


def p_value(found: Answers) -> float:
    return windows_p_value(found, TARGET.chances(TEMPERATURE))


@cache
def plain() -> Answers:
    """What the target says under `coupled` without any proposer."""
    return answers("coupled", [], FULL)


def oracle() -> list[Proposer]:
    return [OracleProposer({r.prompt: told for r, (_, told) in zip(requests(FULL), plain(), strict=True)})]


#: One entry a proposer; fresh ones for every run.
PROPOSERS: dict[str, MakeProposers] = {
    "ngram": lambda: [ngram()],
    "model": lambda: [draft_proposer(SETUP, DRAFT, num_blocks=400)],
    "oracle": oracle,
    "liar": lambda: [Liar(VOCAB)],
    "sampled": lambda: [SampledProposer(Q)],
    "first of several": lambda: [Liar(VOCAB, seed=5), ngram(), draft_proposer(SETUP, DRAFT, num_blocks=400)],
}


def test_the_target_alone_follows_its_law() -> None:
    assert sum(len(tokens) for _, tokens in plain()) >= 100_000
    assert p_value(plain()) > LEAST_P


def test_ratio_without_a_proposer_follows_the_law() -> None:
    assert p_value(answers("ratio", [], PLANTED)) > LEAST_P


#: In CI the most telling proposers make all the draws, the others a quarter; in soak each makes all.
OFTEN = [(name, FULL if name in ("model", "sampled") else FULL // 4) for name in PROPOSERS]
EVERY = [pytest.param(name, FULL, marks=pytest.mark.soak) for name, count in OFTEN if count < FULL]


@pytest.mark.parametrize(("name", "count"), [*OFTEN, *EVERY])
def test_coupled_follows_the_law_and_is_the_target_alone(name: str, count: int) -> None:
    found = answers("coupled", PROPOSERS[name](), count)
    assert p_value(found) > LEAST_P
    assert found == plain()[:count]


@pytest.mark.parametrize(("name", "count"), [*OFTEN, *EVERY])
def test_ratio_follows_the_law(name: str, count: int) -> None:
    assert p_value(answers("ratio", PROPOSERS[name](), count)) > LEAST_P


# ---- planted faults: each must be seen ----


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_draw_read_twice_is_seen_under_ratio(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#54282 (R1): the number that rejected the draft also picks its replacement."""
    proposers = PROPOSERS[name]()
    monkeypatch.setattr(base, "RECOVER_STREAM", ACCEPT_STREAM)
    assert p_value(answers("ratio", proposers, PLANTED)) < LEAST_P


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_law_that_was_not_sampled_is_seen_under_ratio(name: str) -> None:
    """transformers#47932 (R2): q handed to the rule is not the law the drafts came from."""
    proposers: list[Proposer] = [_Misstating(proposer) for proposer in PROPOSERS[name]()]
    assert p_value(answers("ratio", proposers, PLANTED)) < LEAST_P


@pytest.mark.parametrize("name", PROPOSERS)
def test_noise_shared_by_positions_is_seen_under_coupled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proposers = PROPOSERS[name]()
    monkeypatch.setattr(judge, "noise_key", lambda seed, position: noise_key(seed, position // 2))
    assert p_value(answers("coupled", proposers, PLANTED)) < LEAST_P


@pytest.mark.parametrize("name", [name for name in PROPOSERS if name != "oracle"])  # its drafts are the target's draws
def test_a_draft_kept_unverified_is_seen_under_coupled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lattice#243 (R6): the first draft token is emitted whatever the target draws."""

    def trusting(facts: Facts) -> Ruling:
        return Ruling(1, (facts.drafts[0], facts.own[1])) if facts.drafts else Ruling(0, (facts.own[0],))

    proposers = PROPOSERS[name]()
    plant(monkeypatch, "coupled", trusting)
    assert p_value(answers("coupled", proposers, PLANTED)) < LEAST_P


@pytest.mark.parametrize(
    ("stream", "exact"), [(77, True), (RECOVER_STREAM, False), (ACCEPT_STREAM, False)], ids=["own", "recover", "accept"]
)
def test_a_drafter_that_draws_with_the_rules_noise_is_seen(stream: int, exact: bool) -> None:
    """vllm#54282 (R1) word for word: the noise of the draft is used again at recovery."""
    drafter = _Keyed(Q, stream)
    setup = replace(SETUP, knobs=replace(SETUP.knobs, rule="ratio"))
    engine = fake_engine(setup, TARGET, [drafter])
    scheduler = engine._parts.scheduler
    drafter.round_ahead = lambda: scheduler._round + 1
    asked = requests(PLANTED)
    told = run(engine, asked)
    found = p_value([(request.prompt[-1], told[request.id].tokens) for request in asked])
    assert (found > LEAST_P) is exact


class _Misstating:
    """Another proposer's offers under a law they were not drawn from."""

    samples: ClassVar[bool] = True

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.name = inner.name

    def open(self, view: SequenceView) -> None:
        self._inner.open(view)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        return [self._misstate(offer) for offer in self._inner.propose(views, knobs)]

    def _misstate(self, offer: Offer) -> Offer:
        ids = np.tile(np.arange(VOCAB), (len(offer.tokens), 1))
        return replace(offer, law=DraftLaw(ids, np.tile(WRONG_Q, (len(offer.tokens), 1))))

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        self._inner.settle(verdicts)

    def close(self, sequence: int) -> None:
        self._inner.close(sequence)


class _Keyed:
    """Samples from a fixed q by the noise of (seed, round, slot, stream), as the rule does."""

    name: ClassVar[str] = "keyed"
    samples: ClassVar[bool] = True

    def __init__(self, q: Sequence[float], stream: int) -> None:
        self._q = np.asarray(q)
        self._stream = stream
        self.round_ahead: Callable[[], int] = lambda: 0

    def open(self, view: SequenceView) -> None: ...

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        return [self._offer(view) for view in views]

    def _offer(self, view: SequenceView) -> Offer:
        keys = [noise_key(view.sampling.seed, self.round_ahead(), slot, self._stream) for slot in range(view.k)]
        marks = np.cumsum(self._q)
        tokens = tuple(int(np.searchsorted(marks, uniform(key), side="right")) for key in keys)
        ids = np.tile(np.arange(len(self._q)), (view.k, 1))
        return Offer(view.id, len(view.tokens), tokens, DraftLaw(ids, np.tile(self._q, (view.k, 1))), self.name)

    def settle(self, verdicts: Sequence[Verdict]) -> None: ...

    def close(self, sequence: int) -> None: ...
