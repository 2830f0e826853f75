"""Random requests, engines and schedules for the laws, and the plain twin every answer is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from cluster.draft.branching import Branching
from cluster.draft.lookahead import Lookahead
from cluster.draft.proposer import Proposer
from cluster.engine import Engine
from cluster.messages import Delta, Knobs
from cluster.request import Request, Sampling, Speculation
from tests.fakes import (
    Answer,
    FakeSetup,
    HashedLaws,
    LawOf,
    Liar,
    OracleProposer,
    RandomTrees,
    SampledProposer,
    draft_proposer,
    fake_engine,
    ngram,
    run,
)
from tests.remote import WILD, remote, timeless

VOCAB = 6
CONTEXT = 48
LAWS = HashedLaws(VOCAB, order=3, sharp=1.5)
OTHER_LAWS = HashedLaws(VOCAB, order=2, sharp=1.5, seed=9)

#: Proposers by name; `answers` is what the requests' plain twins said.
PROPOSERS: Mapping[str, Callable[[FakeSetup, dict[tuple[int, ...], Sequence[int]]], list[Proposer]]] = {
    "none": lambda setup, answers: [],
    "ngram": lambda setup, answers: [ngram()],
    "model, same law": lambda setup, answers: [draft_proposer(setup, LAWS)],
    "model, other law": lambda setup, answers: [draft_proposer(setup, OTHER_LAWS)],
    "model, few blocks": lambda setup, answers: [draft_proposer(setup, LAWS, num_blocks=max(2, setup.num_blocks // 2))],
    "oracle": lambda setup, answers: [OracleProposer(answers)],
    "liar": lambda setup, answers: [Liar(VOCAB)],
    "trees": lambda setup, answers: [RandomTrees(VOCAB)],
    "model, trees": lambda setup, answers: [draft_proposer(setup, OTHER_LAWS, branching=Branching(width=3))],
    "sampled": lambda setup, answers: [SampledProposer((1 / VOCAB,) * VOCAB)],
    "remote model": lambda setup, answers: [remote(draft_proposer(setup, OTHER_LAWS))],
    "remote models, wild channels": lambda setup, answers: [
        remote(draft_proposer(setup, LAWS), draft_proposer(setup, OTHER_LAWS), faults=WILD)
    ],
    "remote model ahead, wild channels": lambda setup, answers: [
        remote(draft_proposer(setup, OTHER_LAWS), strategy=timeless(Lookahead), faults=WILD, steps=3)
    ],
    "remote liar, then lookup": lambda setup, answers: [remote(Liar(VOCAB), faults=WILD, seed=7), ngram()],
    "first of several": lambda setup, answers: [Liar(VOCAB, seed=3), ngram(), draft_proposer(setup, LAWS)],
}

proposer_names = st.sampled_from(sorted(PROPOSERS))
tokens = st.integers(0, VOCAB - 1)
prompts = st.lists(tokens, min_size=1, max_size=20).map(tuple)
#: Prompts that share beginnings, so that prefix blocks are found.
sharing_prompts = st.builds(
    lambda length, tail: (1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 5, 1)[:length] + tail,
    st.integers(0, 12),
    st.lists(tokens, min_size=1, max_size=8).map(tuple),
)

plain_samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 20),
    temperature=st.sampled_from((0.0, 0.0, 0.4, 1.0, 2.0)),
    seed=st.integers(0, 3),
    ignore_eos=st.booleans(),
)

#: Everything that shapes a law or ends an answer.
rich_samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 20),
    temperature=st.sampled_from((0.0, 0.3, 1.0, 1.0, 2.0)),
    top_p=st.sampled_from((1.0, 0.9, 0.5, 0.01)),
    top_k=st.sampled_from((0, 1, 2, 4)),
    min_p=st.sampled_from((0.0, 0.1, 0.6, 1.0)),
    repetition_penalty=st.sampled_from((1.0, 1.3, 3.0, 0.7)),
    presence_penalty=st.sampled_from((0.0, 2.0, -1.0)),
    frequency_penalty=st.sampled_from((0.0, 2.0, -0.5)),
    logit_bias=st.dictionaries(tokens, st.sampled_from((-100.0, -1.0, 1.0, 4.0)), max_size=2),
    seed=st.integers(0, 3),
    stop=st.lists(st.text("abcdef", min_size=1, max_size=3), max_size=2).map(tuple),
    stop_ids=st.lists(tokens, max_size=1).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from((None, 0, 3, 20)),
)

speculations = st.builds(
    Speculation,
    enabled=st.sampled_from((True, True, True, False)),
    k=st.sampled_from((None, None, 0, 1, 7)),
)

knob_settings = st.builds(
    Knobs,
    k=st.integers(0, 6),
    token_budget=st.integers(1, 24),
    adaptive=st.booleans(),
    tree_nodes=st.sampled_from((0, 8, 16, 64)),
)

setups = st.builds(
    FakeSetup,
    vocab_size=st.just(VOCAB),
    block_tokens=st.sampled_from((1, 2, 3, 4, 8)),
    num_blocks=st.integers(4, 40),
    max_sequences=st.integers(1, 6),
    max_context=st.just(CONTEXT),
    prefix=st.booleans(),
    knobs=knob_settings,
)


def batches(samplings: st.SearchStrategy[Sampling], largest: int = 6) -> st.SearchStrategy[list[Request]]:
    one = st.builds(
        lambda prompt, sampling, speculation, salt: Request("", prompt, sampling, speculation, salt),
        st.one_of(prompts, sharing_prompts),
        samplings,
        speculations,
        st.sampled_from(("", "", "tenant")),
    )
    return st.lists(one, min_size=1, max_size=largest).map(
        lambda batch: [replace(request, id=f"r{number}") for number, request in enumerate(batch)]
    )


def fitting(setup: FakeSetup, batch: Sequence[Request]) -> list[Request]:
    """The requests this engine can take, cut as it would cut them."""
    held = min(setup.max_context, setup.num_blocks * setup.block_tokens)
    return [
        replace(request, sampling=replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room)))
        for request in batch
        if (room := held - len(request.prompt)) >= 1
    ]


def alone(request: Request, law_of: LawOf = LAWS, *, text: bool = False) -> Answer:
    """The plain twin: alone in a roomy engine that never drafts, shares or preempts."""
    roomy = FakeSetup(
        vocab_size=VOCAB, num_blocks=64, prefix=False, max_context=CONTEXT + 64, knobs=Knobs(k=0, adaptive=False)
    )
    return run(fake_engine(roomy, law_of, text=text), [request])[request.id]


def proposers(name: str, setup: FakeSetup, batch: Sequence[Request], twins: Mapping[str, Answer]) -> list[Proposer]:
    return PROPOSERS[name](setup, {request.prompt: twins[request.id].tokens for request in batch})


@dataclass
class Driver:
    """Steps an engine, checking law 1 after everything it does; collects what each request was told."""

    engine: Engine
    told: dict[str, list[Delta]] = field(default_factory=dict)

    def submit(self, request: Request) -> None:
        self.engine.submit(request)
        self.told[request.id] = []
        self.engine.check()

    def step(self) -> list[Delta]:
        deltas = self.engine.step()
        self.engine.check()
        for delta in deltas:
            self.told[delta.request].append(delta)
        return deltas

    def abort(self, name: str) -> None:
        self.engine.abort(name)
        self.engine.check()

    def finish(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine stopped making progress")

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(token for delta in self.told[name] for token in delta.tokens)

    def answer(self, name: str) -> Answer:
        return Answer(self.tokens(name), tuple(self.told[name]))
