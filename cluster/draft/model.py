"""A draft model: a smaller causal language model with the target's vocabulary.

Knows: its own cache, and for each open sequence which tokens' keys and values lie in it.
Refuses to know: the target, acceptance, where the draft model runs.

The draft's cache is always either right or known to be missing: `agreed` counts leading tokens
whose keys and values are there *and* that equal the sequence's known tokens; everything after is
computed again before it is built upon.

Legend of shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from cluster.draft.candidates import Candidates
from cluster.kv.cache import KVCache
from cluster.messages import DraftLaw, Knobs, Offer, Plan, PlanRow, SequenceView, Verdict
from cluster.model.runner import Runner
from cluster.model.sample import Shape, draw, noise_key, shape_logits
from cluster.request import LAW_RULES, Sampling

#: Stream of the draws by which drafts are sampled under `ratio`; the rules read others.
DRAFT_STREAM = 4

#: Pairs of (id, probability) a sampled draft token ships: its law is the renormalised top-m.
TOP_M = 64


@dataclass(slots=True)
class _State:
    """What the draft's cache holds of one sequence: the ids at positions 0, 1, ..."""

    cached: list[int] = field(default_factory=list)
    agreed: int = 0

    def agree(self, tokens: Sequence[int]) -> None:
        """Keep the longest prefix of `cached` that the sequence's known tokens confirm."""
        shared = min(len(self.cached), len(tokens))
        while self.agreed < shared and self.cached[self.agreed] == tokens[self.agreed]:
            self.agreed += 1
        self.agreed = min(self.agreed, shared)
        del self.cached[self.agreed :]


@dataclass(slots=True)
class _Draft:
    """One row being drafted."""

    view: SequenceView
    state: _State
    sampling: Sampling  # the drafter's own
    most: int
    tokens: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    probs: list[np.ndarray] = field(default_factory=list)
    stopped: bool = False  # too unsure of the token that would come next

    @property
    def sampled(self) -> bool:
        """Whether the rule needs to know the law the tokens were drawn from."""
        return self.view.rule in LAW_RULES and not self.sampling.greedy

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.most


class ModelProposer:
    """Drafts k tokens a row, all rows together, one forward pass a token.

    vocab_size: of the target. The draft's own may be padded otherwise: ids that only the draft has
    are never drawn, and a sequence that holds an id only the target has gets no drafts.
    """

    name: ClassVar[str] = "model"
    samples: ClassVar[bool] = True

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        max_context: int,
        candidates: Candidates = Candidates(),
        vocab_size: int | None = None,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._max_context = max_context
        self._candidates = candidates
        self._vocab_size = min(vocab_size or runner.vocab_size, runner.vocab_size)
        self._states: dict[int, _State] = {}
        self._round = 0

    def open(self, view: SequenceView) -> None:
        self.close(view.id)
        self._states[view.id] = _State()

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        self._round += 1
        drafts = self._catch_up([self._begin(view) for view in views if self._fits(view)], knobs)
        going = drafts
        while going:
            going = [draft for draft in going if not draft.done and self._grow(draft)]
            self._extend(going, knobs)
        return [self._offer(draft) for draft in drafts if draft.tokens]

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing to undo: the next view shows which drafts stood."""

    def close(self, sequence: int) -> None:
        self._states.pop(sequence, None)
        self._cache.release(sequence)

    def _begin(self, view: SequenceView) -> _Draft:
        sampling = self._candidates.sampling(view.sampling)
        return _Draft(view, self._states[view.id], sampling, min(view.k, self._candidates.most))

    def _fits(self, view: SequenceView) -> bool:
        return len(view.tokens) + min(view.k, self._candidates.most) <= self._max_context

    def _catch_up(self, drafts: list[_Draft], knobs: Knobs) -> list[_Draft]:
        """Compute known tokens the cache lacks; rows that are up to date get their first draft.

        A long prompt is taken in pieces of the token budget, one piece a round, so that it delays
        nobody; its row offers nothing until it is done.
        """
        rows: list[PlanRow] = []
        ready: list[_Draft] = []
        budget = knobs.token_budget
        keep = {draft.view.id for draft in drafts}
        for draft in drafts:
            view, state = draft.view, draft.state
            self._sync(view, state)
            end = min(len(view.tokens), state.agreed + budget)
            fresh = tuple(view.tokens[state.agreed : end])
            if not fresh or max(fresh) >= self._runner.vocab_size or not self._room(view.id, end, keep):
                continue
            budget -= end - state.agreed
            done = end == len(view.tokens)
            rows.append(PlanRow(view.id, state.agreed, fresh, self._cache.table(view.id), wants=int(done)))
            state.cached.extend(fresh)
            state.agreed = end
            if done:
                ready.append(draft)
        self._advance(rows, ready, knobs)
        for draft in drafts:
            if self._cache.holds(draft.view.id):
                self._cache.commit(draft.view.id, draft.view.tokens, draft.state.agreed)
        return ready

    def _sync(self, view: SequenceView, state: _State) -> None:
        """Bring state and block table in line with the tokens the sequence is known to have."""
        if not self._cache.holds(view.id):
            state.agreed = self._cache.open(view.id, view.tokens, view.salt)
            state.cached = list(view.tokens[: state.agreed])
        state.agree(view.tokens)
        # The newest known token is computed (again) for its logits.
        state.agreed = min(state.agreed, len(view.tokens) - 1)
        del state.cached[state.agreed :]

    def _room(self, sequence: int, length: int, keep: set[int]) -> bool:
        """Reserve blocks, taking those of sequences that draft nothing in this round if need be."""
        while not self._cache.reserve(sequence, length):
            idle = [other for other in self._states if other not in keep and self._cache.holds(other)]
            if not idle:
                return False
            self._cache.release(idle[0])
            self._states[idle[0]] = _State()
        return True

    def _grow(self, draft: _Draft) -> bool:
        """Reserve the slot of the newest draft token, whose successor is wanted."""
        return self._cache.reserve(draft.view.id, len(draft.state.cached) + 1)

    def _extend(self, drafts: list[_Draft], knobs: Knobs) -> None:
        """One more token for each row."""
        rows = []
        for draft in drafts:
            newest = draft.tokens[-1]
            first = len(draft.state.cached)
            rows.append(PlanRow(draft.view.id, first, (newest,), self._cache.table(draft.view.id), wants=1))
            draft.state.cached.append(newest)
        self._advance(rows, drafts, knobs)

    def _advance(self, rows: list[PlanRow], drafts: list[_Draft], knobs: Knobs) -> None:
        """Run the rows; each of `drafts`, in order, is one row that wants logits."""
        if not rows:
            return
        logits_BV = self._runner.launch(Plan(self._round, tuple(rows), knobs)).logits_NV
        if not drafts:
            return
        logits_BV = logits_BV[:, : self._vocab_size]
        sure = self._candidates.confident(logits_BV)
        for draft, keep in zip(drafts, sure, strict=True):
            draft.stopped = not keep
        if not all(sure):
            logits_BV = logits_BV[torch.tensor(sure, device=logits_BV.device)]
            drafts = [draft for draft in drafts if not draft.stopped]
        if drafts:
            self._draw(logits_BV, drafts)

    def _draw(self, logits_BV: torch.Tensor, drafts: list[_Draft]) -> None:
        """One token for each of `drafts`, from its row."""
        shape = Shape.of([draft.sampling for draft in drafts])
        shaped_BV = shape_logits(logits_BV, shape)
        if any(draft.sampled for draft in drafts):
            cut = [
                _note_law(draft, row_V) if draft.sampled else row_V
                for draft, row_V in zip(drafts, shaped_BV, strict=True)
            ]
            shaped_BV = torch.stack(cut)
        tokens = draw(shaped_BV, shape, [self._key(draft) for draft in drafts]).tolist()
        for draft, token in zip(drafts, tokens, strict=True):
            draft.tokens.append(token)

    def _key(self, draft: _Draft) -> int:
        """Under `coupled` the target's own noise; under `ratio` a draw nobody else reads."""
        position = len(draft.view.tokens) + len(draft.tokens)
        seed = draft.view.sampling.seed
        if draft.sampled:
            return noise_key(seed, position, self._round, DRAFT_STREAM)
        return noise_key(seed, position)

    def _offer(self, draft: _Draft) -> Offer:
        law = DraftLaw(np.stack(draft.ids), np.stack(draft.probs)) if draft.sampled else None
        return Offer(draft.view.id, len(draft.view.tokens), tuple(draft.tokens), law, source=self.name)


class QuantizedProposer(ModelProposer):
    """The target itself with its weights in few bits: same layers, same context, fewer bytes to read."""

    name: ClassVar[str] = "quantized"


def _note_law(draft: _Draft, shaped_V: torch.Tensor) -> torch.Tensor:
    """Cut a row to its top m, record that law, and return its log weights."""
    values, ids = shaped_V.topk(min(TOP_M, shaped_V.numel()))
    probs = torch.softmax(values.double(), dim=0)
    draft.ids.append(ids.cpu().numpy())
    draft.probs.append(probs.cpu().numpy())
    cut = torch.full_like(shaped_V, float("-inf"))
    cut[ids] = values
    return cut
