"""Law 3 over random samplings: `ratio` and `block` emit the target's law, whatever shapes it and whoever drafts.

Each case asks one prompt under several hundred seeds and compares the first three tokens, jointly, with
their law: that of the target after penalties, biases, masks, temperature and cuts, multiplied out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from cluster.messages import Knobs
from cluster.model.history import History
from cluster.model.processors import Vocabulary
from cluster.model.sample import Shape, probabilities, shape_logits
from cluster.request import Request, RuleName, Sampling, Speculation
from cluster.verify.rules.base import Facts, Ruling
from tests.fakes import LETTERS, FakeSetup, fake_engine, run
from tests.laws.asked import PLUGGED, every_samplings, some_samplings
from tests.laws.schedules import LAWS, OTHER_LAWS, VOCAB, prompts
from tests.proposers import KINDS, Around
from tests.rulings import plant

SPAN = 3
COUNT = 400
EOS = frozenset({0})
#: Of one case. A fault lands orders below; of thousands of cases some come near.
LEAST_P = 1e-5


@dataclass(frozen=True)
class Case:
    sampling: Sampling
    kind: str
    rule: RuleName
    k: int
    prompt: tuple[int, ...]


def lasting(sampling: Sampling) -> Sampling:
    """Nothing ends the answer early, and nothing breaks."""
    plugged = tuple(name for name in sampling.logits_processors if name != "broken")
    warm = sampling.temperature or 1.0
    return replace(
        sampling, max_tokens=SPAN + 4, min_tokens=min(2, sampling.min_tokens), temperature=warm, stop=(), stop_ids=(),
        ignore_eos=True, logits_processors=plugged, prompt_logprobs=None,
    )  # fmt: skip


cases = st.builds(
    Case,
    sampling=st.one_of(some_samplings(), every_samplings()).map(lasting),
    kind=st.sampled_from(sorted(KINDS)),
    rule=st.sampled_from(("ratio", "block")),
    k=st.integers(1, 5),
    prompt=prompts,
)


def law_after(case: Case, answer: Sequence[int]) -> np.ndarray | None:
    """float64 [V]; None where nothing may follow."""
    history = History(case.prompt, case.sampling, Vocabulary(EOS, LETTERS), PLUGGED)
    history.extend(answer)
    logits_1V = LAWS([*case.prompt, *answer])[None].clone()
    history.apply(logits_1V, [()])
    if history.blocked:
        return None
    shape = Shape.of([case.sampling])
    return probabilities(shape_logits(logits_1V, shape), shape)[0].numpy()


def joint(case: Case) -> np.ndarray | None:
    """float64 [V, V, V]; None where the answer may break off."""
    law = np.zeros((VOCAB,) * SPAN)
    weights = {(): 1.0}
    for _ in range(SPAN):
        grown = {}
        for answer, weight in weights.items():
            after = law_after(case, answer)
            if after is None:
                return None
            grown |= {(*answer, token): weight * p for token, p in enumerate(after) if p > 0}
        weights = grown
    for answer, weight in weights.items():
        law[answer] = weight
    return law


def said(case: Case, count: int) -> list[tuple[int, ...]]:
    knobs = Knobs(k=case.k, token_budget=2048, adaptive=False, max_retries=8)
    setup = FakeSetup(VOCAB, block_tokens=8, num_blocks=400, max_sequences=50, eos_ids=EOS, knobs=knobs)
    drafting = Speculation(rule=case.rule)
    asked = [Request(str(n), case.prompt, replace(case.sampling, seed=n), drafting) for n in range(count)]
    made = [KINDS[case.kind](Around(setup, LAWS, OTHER_LAWS))]
    told = run(fake_engine(setup, LAWS, made, text=True, plugged=PLUGGED), asked)
    return [told[request.id].tokens for request in asked]


def p_value(case: Case, law: np.ndarray, count: int = COUNT) -> float:
    found = Counter(tokens[:SPAN] for tokens in said(case, count))
    cells = sorted(product(range(VOCAB), repeat=SPAN), key=lambda cell: law[cell])
    assert not any(found[cell] for cell in cells if law[cell] == 0)
    statistic, freedom, seen, due = 0.0, -1, 0.0, 0.0
    rest = float(count)
    for cell in cells:  # rare cells are counted together, as the approximation asks
        seen, due = seen + found[cell], due + count * law[cell]
        if due >= 5 and (rest - due >= 5 or cell == cells[-1]):
            statistic, freedom, rest = statistic + (seen - due) ** 2 / due, freedom + 1, rest - due
            seen = due = 0.0
    return float(chi2.sf(statistic, freedom)) if freedom > 0 else 1.0


def hold(count: int) -> list[float]:
    found: list[float] = []

    @seed(3)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )  # fmt: skip
    @given(cases)
    def over(case: Case) -> None:
        law = joint(case)
        assume(law is not None)
        assert law is not None
        found.append(p_value(case, law))
        assert found[-1] > LEAST_P, case

    over()
    return found


def test_the_law_holds_over_random_samplings() -> None:
    assert len(hold(8)) >= 8


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_law_holds_over_hundreds_of_samplings() -> None:
    """And the p-values are spread as they should be: small faults that no case shows alone would crowd them."""
    found = [p for p in hold(250) if p < 1.0]  # 1: a law with one outcome
    assert len(found) > 120
    assert kstest(found, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("kind", ["model, far", "sampled"])
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_rule_that_believes_too_much_is_seen(kind: str, rule: RuleName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every first draft is kept, with penalties and a mask at work."""
    sampling = Sampling(SPAN + 4, frequency_penalty=1.0, bad_ids=((3,),), ignore_eos=True)
    case = Case(sampling, kind, rule, 3, (1, 2, 3))
    law = joint(case)
    assert law is not None
    assert p_value(case, law) > LEAST_P

    def believing(facts: Facts) -> Ruling:
        if len(facts.drafts) < 2:
            return Ruling(0, (facts.recovered(0) if facts.drafts else facts.bonus(),))
        return Ruling(1, (facts.drafts[0], facts.recovered(1)))

    plant(monkeypatch, rule, believing)
    with pytest.raises(AssertionError):
        assert p_value(case, law) > LEAST_P


def test_the_law_by_which_it_is_judged_is_a_law() -> None:
    case = Case(Sampling(SPAN + 4, min_p=0.1, repetition_penalty=1.3), "ngram", "ratio", 3, (1, 2))
    law = joint(case)
    assert law is not None
    assert law.sum() == pytest.approx(1.0)
    first = torch.softmax(torch.from_numpy(law.sum(axis=(1, 2))), dim=0)
    assert first.shape == (VOCAB,)
