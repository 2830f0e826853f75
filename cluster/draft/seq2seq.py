"""An encoder-decoder as a draft: the prompt is encoded once, the decoder guesses the answer.

Knows: for the sequences it drafted for lately, which answer tokens lie in the decoder's cache.
Refuses to know: the target, acceptance, and vocabularies other than its own (translate.py).

What is cached is compared with the answer as it is known before anything is built upon it, so a
rejected draft is taken back whether or not anybody said it was rejected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from cluster.draft.candidates import Candidates
from cluster.draft.drawing import Draft, Drawing
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.model.processors import Vocabulary
from cluster.model.seq2seq import Recall, Seq2SeqModel


@dataclass(slots=True)
class _State:
    """A prompt that was read, and the decoder tokens cached since: the start token, then the answer's."""

    recall: Recall
    cached: list[int] = field(default_factory=list)


class Seq2SeqProposer:
    """Drafts row by row.

    most_held: sequences whose prompt is kept encoded; the one drafted for longest ago is read again.
    frame: ids that the encoder expects before and after a prompt.
    vocab_size: of whoever reads the drafts; ids beyond it are never drawn.
    vocabulary: theirs too, for the processors of a request.
    """

    name: ClassVar[str] = "seq2seq"
    samples: ClassVar[bool] = True

    def __init__(
        self,
        model: Seq2SeqModel,
        most_held: int,
        candidates: Candidates = Candidates(),
        frame: tuple[Sequence[int], Sequence[int]] = ((), ()),
        vocab_size: int | None = None,
        vocabulary: Vocabulary = Vocabulary(),
    ) -> None:
        self._model = model
        self._most_held = most_held
        self._drawing = Drawing(candidates, model.vocab_size, vocab_size, vocabulary)
        self._before, self._after = (list(part) for part in frame)
        self._states: OrderedDict[int, _State] = OrderedDict()

    @property
    def held(self) -> int:
        """Sequences whose prompt is kept encoded now."""
        return len(self._states)

    def open(self, view: SequenceView) -> None:
        self.close(view.id)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:  # noqa: ARG002 - views carry k
        self._drawing.start_round()
        drafts = [self._draft(view, self._state(view)) for view in views if self._fits(view)]
        return [draft.offer(self.name) for draft in drafts if draft.tokens]

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing to undo: the next view shows which drafts stood."""

    def close(self, sequence: int) -> None:
        self._states.pop(sequence, None)
        self._drawing.close(sequence)

    def _fits(self, view: SequenceView) -> bool:
        answer = len(view.tokens) - view.prompt_len
        longest = max(view.prompt_len + len(self._before) + len(self._after), answer + 1 + view.k)
        return longest <= self._model.max_context and max(view.tokens) < self._model.vocab_size

    def _state(self, view: SequenceView) -> _State:
        state = self._states.get(view.id)
        if state is None:
            prompt = [*self._before, *view.tokens[: view.prompt_len], *self._after]
            state = self._states[view.id] = _State(self._model.read(prompt))
        self._states.move_to_end(view.id)
        if len(self._states) > self._most_held:
            self._states.popitem(last=False)
        return state

    def _draft(self, view: SequenceView, state: _State) -> Draft:
        draft = self._drawing.begin(view)
        self._drawing.extend(self._catch_up(view, state)[None], [draft])
        while not draft.done:
            self._drawing.extend(self._feed(state, draft.tokens[-1:])[None], [draft])
        return draft

    def _catch_up(self, view: SequenceView, state: _State) -> torch.Tensor:
        """Logits after the newest known token; what the cache holds beyond the answer is taken back."""
        known = [self._model.start_id, *view.tokens[view.prompt_len :]]
        agreed = 0
        while agreed < min(len(known) - 1, len(state.cached)) and known[agreed] == state.cached[agreed]:
            agreed += 1
        self._model.rewind(state.recall, agreed)
        del state.cached[agreed:]
        return self._feed(state, known[agreed:])

    def _feed(self, state: _State, tokens: list[int]) -> torch.Tensor:
        state.cached.extend(tokens)
        return self._model.feed(state.recall, tokens)
