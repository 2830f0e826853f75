"""One strategy for all there is: every sampling field, proposer, rule, length, order, arrival, abort and preemption.

`Case` is one engine and what is asked of it; `check` holds laws 1, 2, 4, 5 and 8 over it. A few cases run
in every test run, thousands in the soak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from cluster.draft.blend import ExpectedOffer
from cluster.draft.first import FirstOffer
from cluster.draft.proposer import Combiner, Proposer
from cluster.engine import Engine
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.model.history import History
from cluster.model.processors import Vocabulary
from cluster.model.sample import Shape, probabilities, shape_logits
from cluster.request import (
    LAW_RULES,
    Request,
    Speculation,
)
from cluster.sched.policy import ByPriority, Fair, Fcfs, Policy
from cluster.verify.rules.registry import RULES
from tests.fakes import LETTERS, Answer, FakeSetup, LawOf, fake_engine, run
from tests.laws.asked import PLUGGED, every_knobs, every_samplings, every_speculations, some_samplings
from tests.laws.schedules import (
    CONTEXT,
    LAWS,
    OTHER_LAWS,
    VOCAB,
    Driver,
    prompts,
    setups,
    sharing_prompts,
)
from tests.proposers import KINDS, Around

COMBINERS: Mapping[str, Callable[[Sequence[Proposer]], Combiner]] = {"first": FirstOffer, "expected": ExpectedOffer}
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "priority": ByPriority,
    "fair": lambda: Fair(Fcfs()),
    "fair priority": lambda: Fair(ByPriority()),
}
#: Names that requests may give as their method, by kind.
METHODS: Mapping[str, str] = {
    kind: make(Around(FakeSetup(vocab_size=VOCAB), LAWS, OTHER_LAWS)).name for kind, make in KINDS.items()
}


@dataclass(frozen=True)
class Case:
    """One engine and what happens to it. aborts: step by request number; turns: knobs by step."""

    setup: FakeSetup
    kinds: tuple[str, ...]
    combine: str
    policy: str
    asked: list[Request]
    starts: list[int]
    aborts: Mapping[int, int]
    turns: Mapping[int, Knobs]


@st.composite
def cases(draw: st.DrawFn, kind: str, largest: int = 5) -> Case:
    """With `kind` among the proposers, at any place."""
    others = draw(st.lists(st.sampled_from(sorted(KINDS.keys() - {kind})), max_size=2, unique=True))
    at = draw(st.integers(0, len(others)))
    kinds = (*others[:at], kind, *others[at:])
    policy = draw(st.sampled_from(sorted(POLICIES)))
    priorities = st.integers(-1, 2) if "priority" in policy else st.just(0)
    request = st.builds(
        Request,
        id=st.just(""),
        prompt=st.one_of(prompts, sharing_prompts),
        sampling=st.one_of(some_samplings(), some_samplings(), every_samplings()),
        speculation=every_speculations(sorted({METHODS[kind] for kind in kinds})),
        salt=st.sampled_from(("", "", "tenant")),
        group=st.sampled_from(("", "", "g")),
        key=st.sampled_from(("", "me", "you")),
        priority=priorities,
    )
    asked = draw(st.lists(request, min_size=1, max_size=largest))
    blocks = st.one_of(st.integers(4, 12), st.integers(4, 40))  # often few, so that rows give way
    return Case(
        setup=replace(draw(setups), num_blocks=draw(blocks), knobs=draw(every_knobs)),
        kinds=kinds,
        combine=draw(st.sampled_from(sorted(COMBINERS))),
        policy=policy,
        asked=[replace(one, id=f"r{n}") for n, one in enumerate(asked)],
        starts=draw(st.lists(st.integers(0, 8), min_size=largest, max_size=largest)),
        aborts=draw(st.dictionaries(st.integers(0, largest), st.integers(0, 15), max_size=2)),
        turns=draw(st.dictionaries(st.integers(0, 15), every_knobs, max_size=2)),
    )


# ---------------------------------------------------------------- laws 1, 2, 4, 5, 8


def fitting(setup: FakeSetup, batch: Sequence[Request]) -> list[Request]:
    """The requests this engine can take, cut as it would cut them."""
    held = min(setup.max_context, setup.num_blocks * setup.block_tokens)
    cut = []
    for request in batch:
        room = min(held - len(request.prompt), request.sampling.max_tokens)
        if room >= 1:
            least = min(room, request.sampling.min_tokens)
            cut.append(replace(request, sampling=replace(request.sampling, max_tokens=room, min_tokens=least)))
    return cut


def alone(request: Request) -> Answer:
    """Alone in a roomy engine that never drafts, shares or preempts."""
    roomy = FakeSetup(VOCAB, num_blocks=64, prefix=False, max_context=CONTEXT + 64, knobs=Knobs(k=0, adaptive=False))
    plain = replace(request, speculation=Speculation(), priority=0, group="")
    return run(fake_engine(roomy, LAWS, text=True, plugged=PLUGGED), [plain])[request.id]


@dataclass
class Witness:
    """Passes a proposer through and looks at what it offers: law 4.

    law_of: what its drafts are drawn from, where its laws can be made again from nothing.
    """

    inner: Proposer
    law_of: LawOf | None = None
    seen: int = 0

    def __post_init__(self) -> None:
        self.name = self.inner.name
        self.samples = self.inner.samples

    def open(self, view: SequenceView) -> None:
        self.inner.open(view)

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        self.inner.settle(verdicts)

    def close(self, sequence: int) -> None:
        self.inner.close(sequence)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        offers = self.inner.propose(views, knobs)
        shown = {view.id: view for view in views}
        for offer in offers:
            view = shown.get(offer.sequence)  # a liar names others
            if not self.samples:
                assert offer.law is None
            elif view is not None and self.law_of is not None:
                assert (offer.law is not None) is (view.rule in LAW_RULES and not view.sampling.greedy)
                self._look(offer, view)
        return offers

    def _look(self, offer: Offer, view: SequenceView) -> None:
        if offer.law is None or self.law_of is None:
            return
        sampling = replace(view.sampling, logits_processors=())
        history = History(view.tokens[: view.prompt_len], sampling, Vocabulary(frozenset({0}), LETTERS))
        history.catch_up(view.tokens)
        logits_PV = torch.stack([self.law_of([*view.tokens, *offer.tokens[:n]]) for n in range(len(offer.tokens))])
        history.apply(logits_PV, [offer.tokens[:n] for n in range(len(offer.tokens))])
        shape = Shape.of([sampling] * len(offer.tokens))
        wanted = probabilities(shape_logits(logits_PV, shape), shape).numpy()
        for slot, token in enumerate(offer.tokens):
            law = np.zeros(VOCAB)
            np.add.at(law, offer.law.ids[slot], offer.law.probs[slot])
            np.testing.assert_allclose(law, wanted[slot], atol=1e-6)
            assert law[token] > 0
        self.seen += 1


#: Kinds that may offer trees.
TREES = frozenset({"liar", *(kind for kind in KINDS if "trees" in kind)})
#: Kinds whose drafts are drawn from the request's own law over these logits.
DRAWN_FROM: Mapping[str, LawOf] = {
    "model, near": LAWS,
    "model, far": OTHER_LAWS,
    "model, few blocks": LAWS,
    "model, short context": LAWS,
    "quantized": LAWS,
    "seq2seq": LAWS,
}


def engine_of(case: Case, asked: Sequence[Request], twins: Mapping[str, Answer], wrap: Callable = Witness) -> Engine:
    answers = {request.prompt: twins[request.id].tokens for request in asked if request.id in twins}
    around = Around(case.setup, LAWS, OTHER_LAWS, answers)
    made = [wrap(KINDS[kind](around), DRAWN_FROM.get(kind)) for kind in case.kinds]
    policy, combine = POLICIES[case.policy](), COMBINERS[case.combine]
    return fake_engine(case.setup, LAWS, made, text=True, plugged=PLUGGED, policy=policy, combine=combine)


@dataclass
class Tally:
    """What cases had in them: so that a suite can say it held something."""

    cases: int = 0
    rows: int = 0
    compared: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    aborted: int = 0
    sources: set[str] = field(default_factory=set)
    rules: set[str] = field(default_factory=set)

    def add(self, request: Request, answer: Answer, exact: bool) -> None:
        if answer.deltas:
            last = answer.deltas[-1].statistics
            self.rows += 1
            self.compared += exact
            self.drafted += last.drafted
            self.accepted += last.accepted
            self.preempted += last.preemptions > 0
            self.sources |= {count.source for count in last.by_source}
            self.rules.add(last.rule)


def play(case: Case, engine: Engine, asked: Sequence[Request]) -> Driver:
    """Arrivals, aborts and turned knobs as the case says, then to the end."""
    driver = Driver(engine)
    arrivals = list(zip(case.starts, asked, strict=False))
    for step in range(16):
        for start, request in arrivals:
            if start == step:
                driver.submit(request)
        for number, at in case.aborts.items():
            if at == step:
                driver.abort(f"r{number}")
        if step in case.turns:
            driver.engine.set_knobs(case.turns[step])
        driver.step()
    driver.finish()
    assert driver.engine.status.blocks_owned == 0
    return driver


def check(case: Case, tally: Tally | None = None) -> None:
    asked = fitting(case.setup, case.asked)
    twins = {request.id: alone(request) for request in asked}
    driver = play(case, engine_of(case, asked, twins), asked)
    tally = tally if tally is not None else Tally()
    tally.cases += 1
    rules = {case.setup.knobs.rule, *(knobs.rule for knobs in case.turns.values())}
    for request in asked:
        answer, twin = driver.answer(request.id), twins[request.id]
        gone = int(request.id[1:]) in case.aborts
        judged_by = {request.speculation.rule} if request.speculation.rule else rules
        exact = judged_by == {"coupled"} or (request.sampling.greedy and all(RULES[rule].exact for rule in judged_by))
        tally.add(request, answer, exact)
        tally.aborted += gone
        if exact:
            as_alone(answer, twin, gone)
        keeps_its_word(request, answer, gone)
        adds_up(request, answer, not TREES.isdisjoint(case.kinds))


def as_alone(answer: Answer, twin: Answer, gone: bool) -> None:
    """Laws 2, 5 and 8: what the plain twin said, or its beginning for whoever left."""
    told = len(answer.tokens)
    assert answer.tokens == twin.tokens[:told]
    assert answer.logprobs == twin.logprobs[: len(answer.logprobs)]
    if not gone or answer.finish is not None:
        assert (told, answer.finish, answer.text) == (len(twin.tokens), twin.finish, twin.text)
        assert len(answer.logprobs) == len(twin.logprobs)
        assert answer.deltas[-1].fault == twin.deltas[-1].fault
        assert prompt_logprobs(answer) == prompt_logprobs(twin)


def prompt_logprobs(answer: Answer) -> list:
    return [entry for delta in answer.deltas for entry in delta.prompt_logprobs]


def adds_up(request: Request, answer: Answer, trees: bool) -> None:
    """Statistics: by position and by proposer they are the totals; the rule is the one asked for, labelled if lossy."""
    if not answer.deltas:
        return
    last, rule = answer.deltas[-1].statistics, request.speculation.rule
    if rule is not None:
        assert (last.rule, last.lossy) == (rule, not RULES[rule].exact)
    assert last.output_tokens == len(answer.tokens)
    assert sum(count.drafted for count in last.by_source) == last.drafted
    # A tree is counted once at each depth it has.
    assert sum(last.drafted_by_position) == last.drafted or (trees and sum(last.drafted_by_position) < last.drafted)
    assert sum(last.accepted_by_position) == last.accepted == sum(count.accepted for count in last.by_source)
    assert last.lossy or RULES[last.rule].exact


def keeps_its_word(request: Request, answer: Answer, gone: bool = False) -> None:
    """Under any rule: checked against the words of the parameters, apart from how they are put into effect."""
    sampling, said = request.sampling, answer.tokens
    end = sampling.think_end
    forced = range(0)
    if sampling.thinking_tokens is not None and not completes(said[: sampling.thinking_tokens], end):
        forced = range(sampling.thinking_tokens, sampling.thinking_tokens + len(end))
        expected = end[: max(0, len(said) - sampling.thinking_tokens)]
        assert said[forced.start : forced.start + len(expected)] == expected
    free = [token for place, token in enumerate(said) if place not in forced]
    if sampling.allowed_ids is not None:
        assert set(free) <= set(sampling.allowed_ids)
    letters = tuple(chr(token + ord("a")) for token in said)
    for bad in (*sampling.bad_ids, *map(tuple, sampling.bad_words)):
        text = said if isinstance(bad[0], int) else letters
        ends = [at + len(bad) - 1 for at in range(len(said)) if text[at : at + len(bad)] == bad]
        assert all(place in forced for place in ends)
    if answer.finish == "stop":
        assert len(said) > sampling.min_tokens
    if answer.finish == "error":
        assert answer.deltas[-1].fault is not None
    if answer.finish is None:
        assert gone
    tells_of_the_model(request, answer)


def tells_of_the_model(request: Request, answer: Answer) -> None:
    """Log-probabilities are the model's own, of every token and with its rank, whatever shaped the draw."""
    sampling, said = request.sampling, answer.tokens
    if sampling.logprobs is not None:
        assert [entry.token for entry in answer.logprobs] == list(said)
    entries = prompt_logprobs(answer)
    if sampling.prompt_logprobs is not None and said:
        assert [entry.token for entry in entries] == list(request.prompt[1:])
    known = (*request.prompt, *said)
    placed = [*enumerate(entries, start=1), *enumerate(answer.logprobs, start=len(request.prompt))]
    for length, entry in placed:
        law = torch.log_softmax(LAWS(known[:length]).double(), dim=0)
        asked = sampling.prompt_logprobs if length < len(request.prompt) else sampling.logprobs
        assert entry.logprob == pytest.approx(float(law[entry.token]), abs=1e-5)
        assert entry.rank == 1 + int((law > law[entry.token]).sum())
        assert [token for token, _ in entry.top] == law.sort(descending=True).indices[:asked].tolist()


def completes(said: Sequence[int], mark: Sequence[int]) -> bool:
    return any(tuple(said[at : at + len(mark)]) == tuple(mark) for at in range(len(said)))
