"""A draft model's cache over random schedules: whatever it offers is what it would say from nothing.

A real tiny model drafts for a target that takes two of three of its guesses, so that drafts stand,
fall and stand in part. Short of blocks and of context, with shared prompts, preemption, aborts and
speculation that stops and goes on, each offer is compared with transformers' own forward pass over
the whole sequence: keys and values that were stale, torn or another sequence's would change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from cluster.draft.model import ModelProposer
from cluster.kv.blocks import BlockPool
from cluster.kv.cache import KVCache
from cluster.kv.keys import KeyContext
from cluster.messages import Knobs, Offer, SequenceView
from cluster.model.load import LoadedModel, load_model, locate
from cluster.model.quiet import quiet_transformers
from cluster.model.sample import Shape, draw, gumbel, noise_key, shape_logits
from cluster.model.torch_runner import TorchRunner, arena_for
from cluster.request import Request, Sampling
from tests.fakes import FakeSetup, fake_engine
from tests.laws.schedules import Driver

Law = Callable[[tuple[int, ...]], torch.Tensor]

#: Where the two best sums are closer than this, the order of summation may decide.
NEAR = 1e-4
CONTEXT = 40
DRAFT = KeyContext("draft")
WORDS = 24  # prompts use few ids, so that they share beginnings


@pytest.fixture(scope="module")
def law(tiny_llama: Path) -> Law:
    """Logits of the draft model after a context, computed from nothing by the modelling code."""
    with quiet_transformers():
        module = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    @cache
    def logits(context: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            return module(torch.tensor([context])).logits[0, -1].float()

    return logits


class Compared(ModelProposer):
    """Checks each of its own offers."""

    law: Law
    offered = 0

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        offers = super().propose(views, knobs)
        self._cache.check()
        shown = {view.id: view for view in views}
        for offer in offers:
            view = shown[offer.sequence]
            assert offer.base_len == len(view.tokens)
            assert len(view.tokens) + len(offer.tokens) <= self._max_context
            assert 1 <= len(offer.tokens) <= view.k
            self._compare(view, offer.tokens)
            self.offered += 1
        return offers

    def _compare(self, view: SequenceView, tokens: Sequence[int]) -> None:
        known = list(view.tokens)
        shape = Shape.of([view.sampling])
        for token in tokens:
            shaped = shape_logits(self.law(tuple(known))[None], shape)
            key = noise_key(view.sampling.seed, len(known))
            said = int(draw(shaped, shape, [key])[0])
            if said != token:
                sums = shaped[0] + (0 if view.sampling.greedy else gumbel([key], shaped.shape[1], shaped.device)[0])
                assert float(sums[said] - sums[token]) < NEAR, f"{token} offered after {known}, {said} from nothing"
            known.append(token)


def drafter(loaded: LoadedModel, law: Law, max_context: int, num_blocks: int, block_tokens: int) -> Compared:
    runner = TorchRunner(loaded, arena_for(loaded.info, num_blocks, block_tokens=block_tokens))
    made = Compared(runner, KVCache(BlockPool(num_blocks), block_tokens, DRAFT), max_context)
    made.law = law
    return made


def agreeing(law: Law) -> Callable[[Sequence[int]], torch.Tensor]:
    """A target that wants what the draft wants, except after every third context or so."""

    def target(context: Sequence[int]) -> torch.Tensor:
        logits = law(tuple(context))
        return logits.roll(1) if hash(tuple(context[-3:])) % 3 == 0 else logits

    return target


prompts = st.builds(
    lambda shared, tail: (*range(1, 1 + shared), *tail),
    st.integers(0, 14),
    st.lists(st.integers(1, WORDS), min_size=1, max_size=6),
)
asked_for = st.builds(
    lambda prompt, length, temperature, seed: (prompt, Sampling(length, temperature, seed=seed, ignore_eos=True)),
    prompts,
    st.integers(4, 24),
    st.sampled_from((0.0, 0.0, 1.0)),
    st.integers(0, 2),
)
schedules = st.fixed_dictionaries(
    {
        "asked": st.lists(asked_for, min_size=2, max_size=6),
        "starts": st.lists(st.integers(0, 10), min_size=6, max_size=6),
        "aborts": st.dictionaries(st.integers(0, 5), st.integers(1, 14), max_size=2),
        "turns": st.dictionaries(st.integers(0, 24), st.sampled_from((0, 0, 2, 5)), max_size=4),
        "max_context": st.integers(16, CONTEXT),
        "blocks": st.integers(6, 30),  # of the draft, and no more than enough for the target
        "block_tokens": st.sampled_from((2, 3, 4)),
        "budget": st.integers(6, 24),
        "adaptive": st.booleans(),
    }
)


def check(law: Law, directory: Path, schedule: Mapping) -> int:
    """Offers compared."""
    tokens = schedule["block_tokens"]
    loaded = load_model(locate(str(directory)), dtype=torch.float32, device=torch.device("cpu"))
    proposer = drafter(loaded, law, schedule["max_context"], schedule["blocks"], tokens)
    knobs = Knobs(k=4, token_budget=schedule["budget"], adaptive=schedule["adaptive"])
    blocks = max(schedule["blocks"], -(-CONTEXT // tokens) + 1)
    setup = FakeSetup(loaded.info.vocab_size, tokens, blocks, max_sequences=4, max_context=CONTEXT + 8, knobs=knobs)
    driver = Driver(fake_engine(setup, agreeing(law), [proposer]))
    requests = [Request(f"r{n}", prompt, sampling) for n, (prompt, sampling) in enumerate(schedule["asked"])]
    for step in range(25):
        for request, start in zip(requests, schedule["starts"], strict=False):
            if start == step:
                driver.submit(request)
        for number, at in schedule["aborts"].items():
            if at == step and number < len(requests):
                driver.abort(f"r{number}")
        if step in schedule["turns"]:
            driver.engine.set_knobs(replace(knobs, k=schedule["turns"][step]))
        driver.step()
    driver.engine.set_knobs(knobs)
    driver.finish()
    assert proposer._cache.counts.owned == 0
    assert not proposer._states
    return proposer.offered


thorough = settings(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink]
)


@settings(thorough, max_examples=25)
@given(schedules)
def test_every_offer_is_what_it_says_from_nothing(law: Law, tiny_llama: Path, schedule: Mapping) -> None:
    check(law, tiny_llama, schedule)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(thorough, max_examples=400)
@given(schedules)
def test_every_offer_over_hundreds_of_schedules(law: Law, tiny_llama: Path, schedule: Mapping) -> None:
    check(law, tiny_llama, schedule)


BUSY = {
    "asked": [((*range(1, 12 + n % 2), n + 1), Sampling(20, 0.0, ignore_eos=True)) for n in range(5)],
    "starts": [0, 0, 1, 3, 8, 8],
    "aborts": {1: 6},
    "turns": {4: 0, 9: 5, 12: 0, 14: 4},
    "max_context": 28,
    "blocks": 12,
    "block_tokens": 4,
    "budget": 16,
    "adaptive": False,
}


def test_a_busy_schedule_has_offers_to_compare(law: Law, tiny_llama: Path) -> None:
    assert check(law, tiny_llama, BUSY) > 12


@pytest.mark.parametrize("fault", ["trusts what it cached", "forgets what was lost"])
def test_a_stale_cache_is_seen(fault: str, law: Law, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#19796 (P1), TRT#16888 (P4): rejected drafts kept as known, a pause or a prefix that was never filled."""
    from cluster.draft import model

    def trusting(self: model._State, tokens: Sequence[int]) -> None:
        self.agreed = min(len(self.cached), len(tokens))
        del self.cached[self.agreed :]

    def filled(self: KVCache, sequence: int, tokens: Sequence[int], salt: str, *, match: bool = True) -> int:
        found = honest(self, sequence, tokens, salt, match=match)
        if self._context != DRAFT:
            return found
        length = (len(tokens) - 1) // self.block_tokens * self.block_tokens
        return length if self.reserve(sequence, length) else 0

    if fault == "trusts what it cached":
        monkeypatch.setattr(model._State, "agree", trusting)
    else:
        honest = KVCache.open
        monkeypatch.setattr(KVCache, "open", filled)
    with pytest.raises(AssertionError, match="offered after"):
        check(law, tiny_llama, BUSY)
