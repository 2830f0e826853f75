"""The suffix proposer: right guesses, no token changed, no tenant's text seen by another, nothing that grows."""

from __future__ import annotations

import random

import pytest

from cluster.build import assemble
from cluster.config import CacheConfig, EngineConfig, SuffixDraft, TargetConfig
from cluster.draft.suffix.proposer import SuffixProposer
from cluster.draft.suffix.trie import Limits, Wish
from cluster.messages import Knobs, SequenceView, Verdict
from cluster.request import Request, Sampling, Speculation
from tests.fakes import FakeSetup, HashedLaws, fake_engine, run

KNOBS = Knobs()


PAST = Limits(16, 2000, 50)
WISH = Wish(limit=16)


def suffix(past: Limits = PAST, wish: Wish = WISH) -> SuffixProposer:
    return SuffixProposer(wish, past, Limits(past.depth, 2000, 1))


def view(
    tokens: list[int], *, sequence: int = 0, salt: str = "", k: int = 8, prompt_len: int | None = None
) -> SequenceView:
    prompt = len(tokens) if prompt_len is None else prompt_len
    return SequenceView(sequence, tokens, prompt, len(tokens) - 1, Sampling(), "coupled", salt, None, k, 100)


def answered(proposer: SuffixProposer, sequence: int, answer: list[int], salt: str = "") -> None:
    """One whole request that nobody drafted for."""
    proposer.open(view([99], sequence=sequence, salt=salt))
    proposer.settle([Verdict(sequence, 0, tuple(answer))])
    proposer.close(sequence)


def offered(
    proposer: SuffixProposer, tokens: list[int], sequence: int = 500, salt: str = "", k: int = 8
) -> tuple[int, ...]:
    shown = view(tokens, sequence=sequence, salt=salt, k=k)
    proposer.open(shown)
    offers = proposer.propose([shown], KNOBS)
    proposer.close(sequence)
    return offers[0].tokens if offers else ()


def requests(count: int, rng: random.Random, temperature: float) -> list[Request]:
    return [
        Request(
            f"r{at}",
            tuple(rng.randrange(1, 12) for _ in range(rng.randrange(1, 20))),
            Sampling(max_tokens=24, temperature=temperature, seed=at % 3),
            Speculation(method=rng.choice((None, "suffix"))),
            salt=rng.choice(("", "a", "b")),
        )
        for at in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_law_2_same_tokens_with_and_without(temperature: float, seed: int) -> None:
    setup, laws = FakeSetup(eos_ids=frozenset({0})), HashedLaws(12, order=2, seed=seed)
    asked = requests(24, random.Random(seed), temperature)
    plain = run(fake_engine(setup, laws), [Request(r.id, r.prompt, r.sampling, salt=r.salt) for r in asked])
    fast = run(fake_engine(setup, laws, [suffix()]), asked)
    assert {name: answer.tokens for name, answer in fast.items()} == {
        name: answer.tokens for name, answer in plain.items()
    }
    statistics = [answer.deltas[-1].statistics for answer in fast.values()]
    assert sum(each.accepted for each in statistics) > 0
    assert sum(each.drafted for each in statistics) > sum(each.accepted for each in statistics)


def test_a_repeated_question_is_answered_from_memory() -> None:
    """The second time, nearly every token is drafted and accepted."""
    laws = HashedLaws(200, order=8)
    engine = fake_engine(FakeSetup(vocab_size=200, eos_ids=frozenset()), laws, [suffix()])
    ask = [Request(name, tuple(range(20)), Sampling(max_tokens=40, temperature=0.0)) for name in ("first", "second")]
    rounds = [run(engine, [request])[request.id].deltas[-1].statistics.rounds for request in ask]
    assert rounds[0] > 35
    assert rounds[1] < 20


def test_another_salt_sees_nothing() -> None:
    proposer = suffix()
    answered(proposer, 1, [1, 2, 3, 4, 5], salt="a")
    assert offered(proposer, [8, 1, 2], salt="a") == (3, 4)
    assert offered(proposer, [8, 1, 2], salt="b") == offered(proposer, [8, 1, 2]) == ()


def test_offer_is_a_point_mass_no_longer_than_k() -> None:
    proposer = suffix(wish=Wish(limit=16, factor=4.0))
    answered(proposer, 1, list(range(12)))
    shown = view([1, 2, 3], sequence=2, k=2)
    proposer.open(shown)
    (offer,) = proposer.propose([shown], KNOBS)
    assert (offer.tokens, offer.base_len, offer.law, offer.source) == ((4, 5), 3, None, "suffix")
    assert offered(proposer, [1, 2, 3], k=0) == ()


def test_own_text_and_past_answers_compete() -> None:
    proposer = suffix()
    own = [1, 2, 3, 7, 1, 2, 3, 7, 1, 2, 3]
    assert offered(proposer, own)[0] == 7
    for at in range(3):
        answered(proposer, at, [9, 1, 2, 3, 8, 8, 8])
    assert offered(proposer, own)[0] == 8  # certain there, two times in three here
    assert offered(proposer, [5, *own, 7, 1, 2])[:2] == (3, 7)  # six matched here, two there


def test_prompts_are_not_remembered() -> None:
    proposer = suffix()
    shown = view([1, 2, 3, 4, 5, 6], sequence=1, prompt_len=6)
    proposer.open(shown)
    proposer.propose([shown], KNOBS)
    proposer.close(1)
    assert proposer.sizes.tokens == 0
    assert offered(proposer, [1, 2, 3]) == ()


def test_a_thousand_aborts_leave_what_the_limits_allow() -> None:
    laws = HashedLaws(12, order=2)
    proposer = suffix(Limits(16, 500, 20))
    engine = fake_engine(FakeSetup(eos_ids=frozenset()), laws, [proposer])
    rng = random.Random(1)
    for at in range(1000):
        salt = f"tenant {at % 70}"
        engine.submit(
            Request(f"r{at}", tuple(rng.choices(range(12), k=6)), Sampling(max_tokens=30, seed=at), salt=salt)
        )
        for _ in range(rng.randrange(4)):
            engine.step()
        engine.abort(f"r{at - rng.randrange(3)}")
        if at % 50 == 49:
            while engine.has_work:
                engine.step()
    assert not proposer._open
    sizes = proposer.sizes
    assert sizes.tokens <= 500
    assert sizes.sequences <= 20
    assert len(proposer._keys) <= sizes.keys <= 20


def test_reopened_after_preemption_keeps_the_answer_so_far() -> None:
    proposer = suffix()
    proposer.open(view([1, 2], sequence=3))
    proposer.settle([Verdict(3, 0, (5, 6, 7))])
    proposer.open(view([1, 2, 5, 6, 7], sequence=3, prompt_len=2))
    proposer.settle([Verdict(3, 0, (8,)), Verdict(77, 0, (1,))])
    proposer.close(3)
    proposer.close(3)
    assert offered(proposer, [5, 6]) == (7, 8)


def test_it_is_configured_and_named(tiny_llama) -> None:
    config = EngineConfig(
        target=TargetConfig(model=str(tiny_llama), dtype="float32"),
        drafts=(SuffixDraft(kind="suffix", past_requests=3),),
        cache=CacheConfig(blocks=64, block_tokens=8),
    )
    made = assemble(config)
    assert made.resolved.drafts == ("suffix",)
    prompt = tuple(made.tokenizer.encode("the cat and the dog and the cat"))
    answers = []
    for method in (None, "suffix"):
        speculation = Speculation(enabled=method is not None, method=method)
        made.engine.submit(Request("r", prompt, Sampling(max_tokens=32, temperature=0.0, ignore_eos=True), speculation))
        answers.append(
            [token for _ in range(100) if made.engine.has_work for d in made.engine.step() for token in d.tokens]
        )
    assert answers[0] == answers[1]
