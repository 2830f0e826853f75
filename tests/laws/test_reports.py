"""Bugs other engines had, each as a test named by its report.

Where the fault can be put back in a line, the test does so, and then has to fail: a test that passes with the
bug in place shows nothing. P1 and P4 are put back in test_draft_cache.py, R5 and R6 in test_law2_same_tokens.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from cluster.draft import drawing
from cluster.errors import RequestError
from cluster.messages import DraftLaw, Knobs
from cluster.model.history import History
from cluster.model.processors import Past
from cluster.model.sample import noise_key, uniform
from cluster.request import Request, Sampling
from cluster.sched.scheduler import Scheduler
from cluster.verify.rules.base import RECOVER_STREAM
from tests.fakes import FakeSetup, HashedLaws, Liar, draft_proposer, fake_engine, ngram, run
from tests.laws.chi_square import LEAST_P
from tests.laws.schedules import LAWS, PROPOSERS, VOCAB, Driver, alone
from tests.laws.test_law3_every_parameter import Case, joint, p_value
from tests.rulings import ratio


@pytest.mark.parametrize(("stream", "exact"), [(77, True), (RECOVER_STREAM, False)])
def test_vllm_54282_recovery_noise_is_not_the_drafts(stream: int, exact: bool) -> None:
    """R1: 10/60/30 % came out as 10.16/63.04/26.80 where recovery read the noise of the draft."""
    target = torch.tensor([[0.1, 0.6, 0.3], [0.1, 0.6, 0.3]], dtype=torch.float64)
    q = np.array([0.5, 0.3, 0.2])
    law = DraftLaw(np.arange(3)[None], q[None])
    marks = np.cumsum(q)
    counts = np.zeros(3)
    for seed in range(20_000):
        draft = int(np.searchsorted(marks, uniform(noise_key(seed, 1, 0, stream)), side="right"))
        counts[ratio([draft], target, law, seed, 1).tokens[0]] += 1
    found = chisquare(counts, np.array([0.1, 0.6, 0.3]) * counts.sum()).pvalue
    assert bool(found > LEAST_P) is exact


@pytest.mark.parametrize("shipped", ["what was sampled", "the law before"])
def test_transformers_47932_q_is_the_law_sampled(shipped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R2, also transformers#33534: drafts sampled colder came with the law before that."""
    case = Case(Sampling(7, temperature=1.0, top_p=0.95, ignore_eos=True), "model, its own way", "ratio", 3, (1, 2, 3))
    law = joint(case)
    assert law is not None
    if shipped == "the law before":
        honest: Callable = drawing._note_law

        def raw(draft: drawing.Draft, shaped_V: torch.Tensor) -> torch.Tensor:
            cut = honest(draft, shaped_V)
            flatter = draft.probs[-1] ** 0.5  # as before a temperature of its own
            draft.probs[-1] = flatter / flatter.sum()
            return cut

        monkeypatch.setattr(drawing, "_note_law", raw)
    assert (p_value(case, law, 600) > LEAST_P) is (shipped == "what was sampled")


@pytest.mark.parametrize("counted", ["every token", "committed tokens"])
def test_vllm_18902_penalties_see_each_drafts_own_prefix(counted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4, also vllm#42744, sglang#21258: frequency_penalty=2 with look-up, counted for the bonus token alone."""
    flat = lambda context: torch.tensor([0.0, 3.0, 2.0, 1.0, 0.0, 0.0])  # noqa: E731
    request = Request("r", (1, 1, 1, 1, 1), Sampling(20, temperature=0.0, frequency_penalty=2.0, ignore_eos=True))
    twin = alone(request, flat)
    if counted == "committed tokens":
        honest = History.apply
        monkeypatch.setattr(
            History, "apply", lambda self, logits, paths: [honest(self, row[None], [()]) for row in logits]
        )
    told = run(fake_engine(FakeSetup(VOCAB, knobs=Knobs(k=3, adaptive=False)), flat, [ngram()]), [request])["r"]
    assert told.deltas[-1].statistics.drafted > 0
    assert (told.tokens == twin.tokens) is (counted == "every token")


@pytest.mark.parametrize(("field", "value"), [("repetition_penalty", 0.0), ("min_p", 1.5), ("frequency_penalty", 3.0)])
def test_trt_17701_a_penalty_that_cannot_be_is_refused(field: str, value: float) -> None:
    """R4: a penalty of 0 divided by itself."""
    with pytest.raises(RequestError) as caught:
        Sampling(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("name", PROPOSERS)
def test_vllm_41758_a_looping_prompt_reads_the_same(name: str) -> None:
    """R5: one word 48 times; greedy with lookup differed from greedy without."""
    prompt = (2,) * 40
    setup = FakeSetup(vocab_size=VOCAB)
    for temperature in (0.0, 0.5):
        request = Request("r", prompt, Sampling(48, temperature=temperature, ignore_eos=True))
        twin = alone(request)
        told = run(fake_engine(setup, LAWS, PROPOSERS[name](setup, {prompt: twin.tokens})), [request])["r"]
        assert told.tokens == twin.tokens


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_lattice_243_a_drafter_that_always_errs_is_never_believed(rule: str) -> None:
    """R6: the first draft token was committed unverified."""
    request = Request("r", (1, 2, 3), Sampling(24, temperature=0.0, ignore_eos=True))
    setup = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=4, rule=rule, adaptive=False))
    twin = alone(request)
    wrong = [(token + 1) % VOCAB for token in twin.tokens]
    told = run(fake_engine(setup, LAWS, PROPOSERS["oracle"](setup, {request.prompt: wrong})), [request])["r"]
    assert told.tokens == twin.tokens
    assert told.deltas[-1].statistics.accepted == 0
    assert told.deltas[-1].statistics.drafted > 0


def automaton(seen: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
    """Guided: 1, then any number of 2s and 3s that take turns, then 4, and again. Its state follows from the tokens."""
    successors = {1: (2, 3), 2: (3, 4), 3: (2, 4), 4: (1,)}
    mask = torch.full_like(logits_V, float("-inf"))
    mask[list(successors.get(seen[-1], (1,)))] = 0.0
    return logits_V + mask


@pytest.mark.parametrize("after", ["rolled back", "left as drafted"])
def test_vllm_31955_a_guided_request_is_preempted(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """G3, also vllm#30916: drafts that were never committed stayed in the state machine over a preemption."""
    setup = FakeSetup(VOCAB, block_tokens=1, num_blocks=26, knobs=Knobs(k=4, token_budget=14, adaptive=False))
    guided = Sampling(14, temperature=1.0, ignore_eos=True, logits_processors=("automaton",), frequency_penalty=0.1)
    asked = [Request(f"r{n}", (n, 2, 4), replace(guided, seed=n)) for n in range(4)]
    plugged = {"automaton": automaton}
    twins = run(fake_engine(FakeSetup(VOCAB, knobs=Knobs(k=0)), LAWS, plugged=plugged), asked)
    if after == "left as drafted":
        monkeypatch.setattr(Past, "pop", lambda self: None)
    told = run(fake_engine(setup, LAWS, [Liar(VOCAB, seed=1), ngram()], plugged=plugged), asked)
    assert sum(answer.deltas[-1].statistics.preemptions for answer in told.values()) > 0
    same = all(told[request.id].tokens == twins[request.id].tokens for request in asked)
    assert same is (after == "rolled back")
    if same:
        for request in asked:
            said = told[request.id].tokens
            assert all(automaton((token,), torch.zeros(VOCAB))[after] == 0 for token, after in pairwise((4, *said)))


def test_vllm_49620_a_placeholder_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A1: the fake model lets no id through that is none."""
    honest = Scheduler._preempt

    def careless(self: Scheduler, sequence: Any, board: Any) -> None:
        honest(self, sequence, board)
        sequence.tokens.append(-1)

    monkeypatch.setattr(Scheduler, "_preempt", careless)
    with pytest.raises(AssertionError):
        test_vllm_49620_only_known_ids_reach_the_model_after_preemption()


def test_vllm_49620_only_known_ids_reach_the_model_after_preemption() -> None:
    """A1: placeholder -1 reached the embedding. The fake model asserts ids in range and slots written."""
    setup = FakeSetup(vocab_size=VOCAB, block_tokens=1, num_blocks=20, knobs=Knobs(k=4, token_budget=7))
    asked = [Request(f"r{n}", (n, 2, 3), Sampling(15, seed=n, ignore_eos=True)) for n in range(4)]
    engine = fake_engine(setup, LAWS, PROPOSERS["first of several"](setup, {}))
    told = run(engine, asked)
    assert sum(answer.deltas[-1].statistics.preemptions for answer in told.values()) > 0
    for plan in engine._parts.runner.plans:
        for row in plan.rows:
            assert len(row.blocks) * setup.block_tokens >= row.end


def test_sglang_19796_a_prefix_hit_leaves_the_drafts_cache_right() -> None:
    """P1: the same prompt twice; the drafter of the second finds keys and values that are really there."""
    setup = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=4, adaptive=False))
    prompt = tuple(n % VOCAB for n in range(21))
    engine = fake_engine(setup, LAWS, [draft_proposer(setup, LAWS)])
    for name in ("first", "second"):
        request = Request(name, prompt, Sampling(20, temperature=0.0, ignore_eos=True))
        news = run(engine, [request])[name].deltas[-1].statistics
        assert news.accepted == news.drafted > 0  # the same law: a wrong draft context would show here
        assert news.cached_tokens == (20 if name == "second" else 0)


def test_trt_16888_k_may_go_to_zero_and_back() -> None:
    """P4: a pause left the draft's cache stale. 4, 0, 4: every draft afterwards is right again."""
    knobs = Knobs(k=4, adaptive=False)
    setup = FakeSetup(vocab_size=VOCAB, knobs=knobs)
    driver = Driver(fake_engine(setup, LAWS, [draft_proposer(setup, LAWS)]))
    request = Request("r", (1, 2, 3), Sampling(60, temperature=0.7, ignore_eos=True))
    driver.submit(request)
    drafted = []
    for k, steps in ((4, 4), (0, 5), (4, 4)):
        driver.engine.set_knobs(replace(knobs, k=k))
        for _ in range(steps):
            driver.step()
        drafted.append(driver.told["r"][-1].statistics.drafted)
    driver.finish()
    assert drafted[0] == drafted[1] < drafted[2]
    statistics = driver.told["r"][-1].statistics
    assert statistics.accepted == statistics.drafted
    assert driver.tokens("r") == alone(request).tokens


@pytest.mark.parametrize("adaptive", [True, False])
def test_speculation_switched_on_while_a_request_runs(adaptive: bool) -> None:
    """Found here: under adaptive control a sequence first seen at k = 0 never drafted again."""
    setup = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=0, adaptive=adaptive))
    driver = Driver(fake_engine(setup, LAWS, [draft_proposer(setup, LAWS)]))
    driver.submit(Request("r", (1, 2, 3), Sampling(40, temperature=0.0, ignore_eos=True)))
    for _ in range(5):
        driver.step()
    driver.engine.set_knobs(Knobs(k=4, adaptive=adaptive))
    driver.finish()
    assert driver.told["r"][-1].statistics.drafted > 0


def test_drafts_never_take_the_step_of_a_row_behind_them() -> None:
    """Found here: with k + 1 tokens a row and a small budget the last ready rows stood still."""
    setup = FakeSetup(vocab_size=VOCAB, knobs=Knobs(k=5, token_budget=8, adaptive=False))
    driver = Driver(fake_engine(setup, HashedLaws(VOCAB, sharp=0.5), [ngram(), PROPOSERS["sampled"](setup, {})[0]]))
    for number in range(6):
        driver.submit(Request(f"r{number}", (number, 1), Sampling(30, ignore_eos=True, seed=number)))
    for _ in range(8):
        driver.step()
    for _ in range(5):
        assert {delta.request for delta in driver.step()} == {f"r{number}" for number in range(6)}
    driver.finish()
