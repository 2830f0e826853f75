"""A draft model: a smaller causal language model with the target's vocabulary.

Knows: its own cache, and for each open sequence which tokens' keys and values lie in it.
Refuses to know: the target, acceptance, where the draft model runs.

The draft's cache is always either right or known to be missing: `agreed` counts leading tokens
whose keys and values are there *and* that equal the sequence's known tokens; everything after is
computed again before it is built upon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from cluster.draft.branching import Branching
from cluster.draft.candidates import Candidates
from cluster.draft.drawing import Draft, Drawing
from cluster.kv.cache import KVCache
from cluster.messages import Knobs, Offer, Plan, PlanRow, SequenceView, Verdict
from cluster.model.processors import Vocabulary
from cluster.model.runner import Runner


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


class ModelProposer:
    """Drafts k tokens a row, all rows together, one forward pass a token; or a tree, one pass a level.

    vocab_size: of the target. The draft's own may be padded otherwise: ids that only the draft has
    are never drawn, and a sequence that holds an id only the target has gets no drafts.
    vocabulary: of the target, for the processors of a request.
    branching: draft trees where a step has room for more nodes than a chain would fill.
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
        vocabulary: Vocabulary = Vocabulary(),
        branching: Branching | None = None,
    ) -> None:
        self._branching = branching
        self._runner = runner
        self._cache = cache
        self._max_context = max_context
        self._most = candidates.most
        self._drawing = Drawing(candidates, runner.vocab_size, vocab_size, vocabulary)
        self._states: dict[int, _State] = {}
        self._round = 0

    @property
    def runner(self) -> Runner:
        """What computes its steps."""
        return self._runner

    def open(self, view: SequenceView) -> None:
        self.close(view.id)
        self._states[view.id] = _State()

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        self._drawing.start_round()
        bushy = [] if self._branching is None else [view for view in views if view.nodes > view.k]
        trees = [] if self._branching is None else self._trees(bushy, self._branching, knobs)
        chains = [view for view in views if self._branching is None or view.nodes <= view.k]
        drafts = [draft for view in chains if (draft := self._begin(view)) is not None]
        going = drafts
        while going:
            # A long prompt is taken one piece a round: its row offers nothing until it is done.
            going = [draft for draft in self.advance(going, knobs) if draft.tokens]
        return [*trees, *(draft.offer(self.name) for draft in drafts if draft.tokens)]

    def _trees(self, views: Sequence[SequenceView], branching: Branching, knobs: Knobs) -> list[Offer]:
        """What is computed of a tree is forgotten after it: the path that stands is read as known tokens are."""
        self._round += 1
        drafts = [draft for view in views if (draft := self._begin(view)) is not None]
        rows, ready = self._catch_up(drafts, knobs, {view.id for view in views})
        logits_BV = self._compute(rows, knobs)
        self._commit(drafts)
        trees = [self._drawing.plant(draft.view, branching) for draft in ready]
        going = trees
        while going:
            self._drawing.branch(logits_BV, going)
            going = [tree for tree in going if tree.front and self._cache.reserve(tree.view.id, tree.length)]
            logits_BV = self._compute([tree.row(self._cache.table(tree.view.id)) for tree in going], knobs)
        return [tree.offer(self.name) for tree in trees if tree.tokens]

    def begin(self, view: SequenceView, spread: int, like: int | None = None) -> Draft | None:
        """A draft to be advanced pass by pass, with draws of its own; None where the context would not hold it.

        `view.tokens` must not change until the sequence is closed. spread: likely tokens noted a position.
        like: another sequence, all of whose tokens begin this one's: what is cached of it need not be looked up.
        """
        self._drawing.start_round()
        if like is not None and self._cache.holds(like):
            agreed = self._cache.fork(view.id, like, len(view.tokens))
            self._states[view.id] = _State(list(view.tokens[:agreed]), agreed)
        return self._begin(view, spread)

    def advance(self, drafts: Sequence[Draft], knobs: Knobs) -> list[Draft]:
        """One forward pass: known tokens the cache lacks, or one more draft token, for each; returns who goes on."""
        self._round += 1
        keep = {draft.view.id for draft in drafts}
        going = [draft for draft in drafts if draft.tokens and not draft.done and self._grow(draft)]
        fresh = [draft for draft in drafts if not draft.tokens and not draft.done]
        rows, ready = self._catch_up(fresh, knobs, keep)
        self._advance([*rows, *self._newest(going)], [*ready, *going], knobs)
        self._commit(fresh)
        return [draft for draft in (*fresh, *going) if not draft.done]

    def restart_draws(self, first_round: int) -> None:
        """Draws that no other drafter of the same sequences makes."""
        self._drawing.restart(first_round)

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing to undo: the next view shows which drafts stood."""

    def close(self, sequence: int) -> None:
        self._states.pop(sequence, None)
        self._drawing.close(sequence)
        self._cache.release(sequence)

    def swap(self, runner: Runner) -> None:
        """Draft with other weights of the same shape; what the cache holds is the old ones', and forgotten."""
        for sequence in self._states:
            self._cache.release(sequence)
            self._states[sequence] = _State()
        self._cache.forget_prefixes()
        self._runner = runner

    def _fits(self, view: SequenceView) -> bool:
        return len(view.tokens) + min(view.k, self._most) <= self._max_context

    def _begin(self, view: SequenceView, spread: int = 0) -> Draft | None:
        return self._drawing.begin(view, spread) if self._fits(view) else None

    def _catch_up(self, drafts: Sequence[Draft], knobs: Knobs, keep: set[int]) -> tuple[list[PlanRow], list[Draft]]:
        """Rows of known tokens the cache lacks, and the drafts that will be up to date after them.

        At most the token budget a pass, so that a long prompt delays nobody. A draft that cannot be
        computed stops.
        """
        rows: list[PlanRow] = []
        ready: list[Draft] = []
        budget = knobs.token_budget
        for draft in drafts:
            view, state = draft.view, self._states[draft.view.id]
            self._sync(view, state)
            end = min(len(view.tokens), state.agreed + budget)
            fresh = tuple(view.tokens[state.agreed : end])
            if not fresh:
                continue
            if max(fresh) >= self._runner.vocab_size or not self._room(view.id, end, keep):
                draft.stopped = True
                continue
            budget -= end - state.agreed
            done = end == len(view.tokens)
            rows.append(PlanRow(view.id, state.agreed, fresh, self._cache.table(view.id), wants=int(done)))
            state.cached.extend(fresh)
            state.agreed = end
            if done:
                ready.append(draft)
        return rows, ready

    def _commit(self, drafts: Sequence[Draft]) -> None:
        """Publish what of the known tokens was computed."""
        for draft in drafts:
            if self._cache.holds(draft.view.id):
                self._cache.commit(draft.view.id, draft.view.tokens, self._states[draft.view.id].agreed)

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

    def _grow(self, draft: Draft) -> bool:
        """Reserve the slot of the newest draft token, whose successor is wanted."""
        return self._cache.reserve(draft.view.id, len(self._states[draft.view.id].cached) + 1)

    def _newest(self, drafts: Sequence[Draft]) -> list[PlanRow]:
        """Rows of each draft's newest token, whose successor is wanted."""
        rows = []
        for draft in drafts:
            newest, cached = draft.tokens[-1], self._states[draft.view.id].cached
            rows.append(PlanRow(draft.view.id, len(cached), (newest,), self._cache.table(draft.view.id), wants=1))
            cached.append(newest)
        return rows

    def _advance(self, rows: Sequence[PlanRow], drafts: Sequence[Draft], knobs: Knobs) -> None:
        """Run the rows; each of `drafts`, in order, is one row that wants logits."""
        logits_BV = self._compute(rows, knobs)
        if drafts:
            self._drawing.extend(logits_BV, drafts)

    def _compute(self, rows: Sequence[PlanRow], knobs: Knobs) -> torch.Tensor:
        """Float32 logits [B, V] of the positions that want them."""
        if not rows:
            return torch.empty(0, self._runner.vocab_size)
        return self._runner.launch(Plan(self._round, tuple(rows), knobs)).logits_NV


class QuantizedProposer(ModelProposer):
    """The target itself with its weights in few bits: same layers, same context, fewer bytes to read."""

    name: ClassVar[str] = "quantized"
