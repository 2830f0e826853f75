"""A model with known laws, and proposers that tell the truth, guess, or lie.

`FakeRunner` keeps no sequence: it writes each token's id into the slot its plan names and reads
the context back through the block table, so a wrong block, a stale slot or a lost write changes
the logits just as it would with keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from cluster.control.length import LengthControl
from cluster.draft.branching import Branching
from cluster.draft.first import FirstOffer
from cluster.draft.model import ModelProposer
from cluster.draft.ngram import NgramProposer
from cluster.draft.proposer import Combiner, Proposer
from cluster.engine import Engine, Parts
from cluster.kv.blocks import BlockPool
from cluster.kv.cache import KVCache
from cluster.kv.keys import KeyContext
from cluster.messages import Delta, DraftLaw, Knobs, Offer, Plan, SequenceView, TokenLogprob, Verdict
from cluster.model.processors import LogitsProcessor, Vocabulary
from cluster.model.runner import Flight
from cluster.request import Request
from cluster.sched.policy import Policy
from cluster.sched.scheduler import Limits, Scheduler
from cluster.text.lexicon import Lexicon
from cluster.tree import paths
from cluster.verify.judge import Judge

LawOf = Callable[[Sequence[int]], torch.Tensor]


@dataclass(frozen=True)
class HashedLaws:
    """Logits as a function of the last `order` tokens: arbitrary but fixed; `sharp` scales them."""

    vocab_size: int
    order: int = 3
    sharp: float = 2.0
    seed: int = 0

    def __call__(self, context: Sequence[int]) -> torch.Tensor:
        tail = tuple(context[-self.order :])
        generator = torch.Generator().manual_seed(hash((self.seed, *tail)) & 0x7FFFFFFF)
        return torch.randn(self.vocab_size, generator=generator) * self.sharp


class FakeRunner:
    """Laws by context, context by block table."""

    def __init__(self, law_of: LawOf, vocab_size: int, num_blocks: int, block_tokens: int) -> None:
        self._law_of = law_of
        self._arena = np.full((num_blocks, block_tokens), -1, dtype=np.int64)
        self._block_tokens = block_tokens
        self.vocab_size = vocab_size
        self.plans: list[Plan] = []

    def launch(self, plan: Plan) -> Flight:
        self.plans.append(plan)
        rows = []
        places = self._arena.reshape(-1)
        moved = [(place, int(places[source])) for source, place in plan.moves]  # all read before any is written
        for place, token in moved:
            places[place] = token
        written: dict[tuple[int, int], int] = {}
        for row in plan.rows:
            assert all(0 <= token < self.vocab_size for token in row.tokens)
            for offset, token in enumerate(row.tokens):
                block, slot = divmod(row.first + offset, self._block_tokens)
                place = (row.blocks[block], slot)
                assert written.setdefault(place, token) == token, "two rows of a step write one slot"
                self._arena[place] = token
            context = self._arena[list(row.blocks)].reshape(-1)[: row.end].tolist()
            assert -1 not in context, "attention over a slot nobody wrote"
            wanted = range(row.end - row.wants, row.end)
            contexts = [context[: slot + 1] for slot in wanted if slot < row.root]
            branches = paths(context[row.root :], row.parents or ())
            contexts += [[*context[: row.root], *branches[slot - row.root]] for slot in wanted if slot >= row.root]
            positions = row.positions[len(row.tokens) - row.wants :]
            assert [len(seen) for seen in contexts] == [position + 1 for position in positions]
            rows.extend(self._law_of(seen) for seen in contexts)
        logits = torch.stack(rows).float() if rows else torch.zeros(0, self.vocab_size)
        return Flight(plan, logits)


LETTERS = Lexicon([bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz"])


class LetterStream:
    """Token t reads as the t-th letter; the letter "d" comes out only with the token after it."""

    def __init__(self) -> None:
        self._held = ""

    def step(self, token: int) -> str:
        text = self._held + "abcdefghijklmnopqrstuvwxyz"[token]
        self._held = "d" if text.endswith("d") else ""
        return text.removesuffix("d")

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class OracleProposer:
    """Knows the answers it was given by prompt; the best possible proposer."""

    name: ClassVar[str] = "oracle"
    samples: ClassVar[bool] = False

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]]) -> None:
        self._answers = answers

    def open(self, view: SequenceView) -> None: ...

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        offers = []
        for view in views:
            answer = self._answers.get(tuple(view.tokens[: view.prompt_len]), ())
            done = len(view.tokens) - view.prompt_len
            tokens = tuple(answer[done : done + view.k])
            offers.append(Offer(view.id, len(view.tokens), tokens, source=self.name))
        return offers

    def settle(self, verdicts: Sequence[Verdict]) -> None: ...

    def close(self, sequence: int) -> None: ...


class Liar:
    """Offers noise: random tokens, stale bases, duplicates, too long, ids out of range, unknown rows."""

    name: ClassVar[str] = "liar"
    samples: ClassVar[bool] = False

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab = vocab_size

    def open(self, view: SequenceView) -> None: ...

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        offers = []
        for view in views:
            length = int(self._random.integers(0, view.k + 3))
            tokens = tuple(int(t) for t in self._random.integers(0, self._vocab, length))
            offer = Offer(view.id, len(view.tokens), tokens, source=self.name)
            offers.append(self._spoil(offer))
            if self._random.random() < 0.2:
                offers.append(offer)
        return offers

    def _spoil(self, offer: Offer) -> Offer:
        pick = self._random.random()
        if pick < 0.1:
            return replace(offer, base_len=offer.base_len + int(self._random.integers(-3, 4)))
        if pick < 0.2:
            return replace(offer, tokens=(*offer.tokens, self._vocab + 5))
        if pick < 0.3:
            return replace(offer, sequence=10_000)
        return offer

    def settle(self, verdicts: Sequence[Verdict]) -> None: ...

    def close(self, sequence: int) -> None: ...


class RandomTrees:
    """Offers random trees, now and then a chain, one too large, or one that is none: with few words some are right."""

    name: ClassVar[str] = "trees"
    samples: ClassVar[bool] = False

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab = vocab_size

    def open(self, view: SequenceView) -> None: ...

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        return [self._offer(view) for view in views]

    def _offer(self, view: SequenceView) -> Offer:
        size = int(self._random.integers(0, max(view.k, view.nodes) + 3))
        tokens = tuple(int(t) for t in self._random.integers(0, self._vocab, size))
        bushy = int(self._random.integers(1, 8))
        parents = tuple(int(self._random.integers(max(-1, node - bushy), node)) for node in range(size))
        if self._random.random() < 0.05:
            parents = (*parents[:-1], size)
        return Offer(
            view.id,
            len(view.tokens),
            tokens,
            source=self.name,
            parents=parents if self._random.random() < 0.8 else None,
        )

    def settle(self, verdicts: Sequence[Verdict]) -> None: ...

    def close(self, sequence: int) -> None: ...


class SampledProposer:
    """Samples each draft from a fixed law q by its own generator and says so: for the `ratio` rule."""

    name: ClassVar[str] = "sampled"
    samples: ClassVar[bool] = True

    def __init__(self, q: Sequence[float], seed: int = 0) -> None:
        self._q = np.asarray(q, dtype=np.float64)
        self._random = np.random.default_rng(seed)

    def open(self, view: SequenceView) -> None: ...

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        return [self._offer(view) for view in views]

    def _offer(self, view: SequenceView) -> Offer:
        tokens = tuple(int(t) for t in self._random.choice(len(self._q), size=view.k, p=self._q))
        ids = np.tile(np.arange(len(self._q)), (view.k, 1))
        return Offer(view.id, len(view.tokens), tokens, DraftLaw(ids, np.tile(self._q, (view.k, 1))), self.name)

    def settle(self, verdicts: Sequence[Verdict]) -> None: ...

    def close(self, sequence: int) -> None: ...


@dataclass(frozen=True)
class FakeSetup:
    """How to build an engine around a fake model; defaults make blocks and drafts matter."""

    vocab_size: int = 12
    block_tokens: int = 4
    num_blocks: int = 64
    max_sequences: int = 8
    max_waiting: int = 1000
    max_context: int = 128
    eos_ids: frozenset[int] = frozenset({0})
    prefix: bool = True
    knobs: Knobs = Knobs(k=4, token_budget=32, adaptive=False)


def fake_cache(setup: FakeSetup, num_blocks: int | None = None) -> KVCache:
    pool = BlockPool(num_blocks or setup.num_blocks)
    return KVCache(pool, setup.block_tokens, KeyContext("fake"), prefix=setup.prefix)


def draft_proposer(
    setup: FakeSetup, law_of: LawOf, num_blocks: int | None = None, branching: Branching | None = None
) -> ModelProposer:
    """A real `ModelProposer` over another fake model."""
    blocks = num_blocks or setup.num_blocks
    runner = FakeRunner(law_of, setup.vocab_size, blocks, setup.block_tokens)
    vocabulary = Vocabulary(setup.eos_ids, LETTERS)
    return ModelProposer(
        runner, fake_cache(setup, blocks), setup.max_context, vocabulary=vocabulary, branching=branching
    )


def ngram() -> NgramProposer:
    return NgramProposer(max_match=3, min_match=1)


def fake_engine(
    setup: FakeSetup,
    law_of: LawOf,
    proposers: Sequence[Proposer] = (),
    *,
    text: bool = False,
    plugged: Mapping[str, LogitsProcessor] | None = None,
    policy: Policy | None = None,
    combine: Callable[[Sequence[Proposer]], Combiner] = FirstOffer,
) -> Engine:
    """`text`: answers are also read, by `LetterStream`, so that stop strings can match."""
    cache = fake_cache(setup)
    return Engine(
        Parts(
            runner=FakeRunner(law_of, setup.vocab_size, setup.num_blocks, setup.block_tokens),
            cache=cache,
            scheduler=Scheduler(cache, Limits(setup.max_sequences, setup.max_waiting), policy),
            judge=Judge(
                setup.vocab_size,
                setup.eos_ids,
                (lambda prompt: LetterStream()) if text else None,
                plugged,
                LETTERS if text else None,
            ),
            proposer=combine(proposers),
            control=LengthControl(setup.knobs),
            max_context=setup.max_context,
        )
    )


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    deltas: tuple[Delta, ...]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return tuple(logprob for delta in self.deltas for logprob in delta.logprobs)

    @property
    def finish(self) -> str | None:
        return self.deltas[-1].finish if self.deltas else None


def run(engine: Engine, requests: Sequence[Request], *, max_steps: int = 100_000) -> dict[str, Answer]:
    """Submit all, step until nothing is left, checking law 1 after every step."""
    for request in requests:
        engine.submit(request)
    deltas: dict[str, list[Delta]] = {request.id: [] for request in requests}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for delta in engine.step():
            deltas[delta.request].append(delta)
        engine.check()
    assert not engine.has_work, "the engine stopped making progress"
    return {
        name: Answer(tuple(token for delta in news for token in delta.tokens), tuple(news))
        for name, news in deltas.items()
    }
