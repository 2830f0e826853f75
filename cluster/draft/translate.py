"""A draft in another vocabulary: the target's text is encoded for it, its guess encoded back.

Knows: both tokenizers, and for each open sequence its text in the draft's ids.
Refuses to know: how the draft in that vocabulary is made (any proposer will do), and laws: what comes
back is a point mass, so it is exact at any temperature.

    target ids -> text -> draft ids -> inner proposer -> draft ids -> text -> target ids

Two texts meet at the newest known token. What goes back ends where a word ends: how a word is
split into tokens is certain only once it is known where it stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cluster.draft.proposer import Proposer
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.request import Sampling
from cluster.text.tokenizer import TextStream, Tokenizer

#: Draft tokens asked for beyond k: the last word is lost, and the vocabularies cut differently.
_MARGIN = 4

#: Characters at the end of a text that are encoded again each time; what lies before them is settled.
_WINDOW = 96

#: Known tokens of the target encoded again together with a guess, to find where one ends and the other starts.
_CONTEXTS = (4, 8, 16)


class Rendering:
    """A growing text in a tokenizer's ids, of which only the end is ever encoded again.

    `ids` is what encoding the whole text gives, up to merges across the cuts, which are made where
    a word starts; `prompt_len` counts those of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str) -> None:
        self._tokenizer = tokenizer
        self._joins = tokenizer.encode_plain("a b") == tokenizer.encode_plain("a") + tokenizer.encode_plain(" b")
        self.ids: list[int] = [*tokenizer.frame[0], *tokenizer.encode_plain(prompt)]
        self.prompt_len = len(self.ids)
        self._settled = len(self.ids)
        self._tail = ""

    def extend(self, text: str) -> bool:
        """Put `text` behind; False when ids that were there before changed."""
        if not text:
            return True
        start, old = self._settled, self.ids[self._settled :]
        self._tail += text
        cut = word_start(self._tail[: len(self._tail) - _WINDOW]) if len(self._tail) > 2 * _WINDOW else 0
        if cut and self._joins:
            self._put(self._tail[:cut])
            self._settled = len(self.ids)
            self._tail = self._tail[cut:]
        self._put(self._tail)
        return self.ids[start : start + len(old)] == old

    def _put(self, tail: str) -> None:
        self.ids[self._settled :] = self._tokenizer.encode_plain(tail)


def word_start(text: str) -> int:
    """Where the last white space begins: text before it keeps its tokens whatever follows. 0: nowhere."""
    return next(
        (at for at in range(len(text) - 1, 0, -1) if text[at].isspace() and not text[at - 1].isspace()),
        0,
    )


@dataclass(slots=True)
class _State:
    """One sequence: how many of the target's tokens were read, their text so far, and it in draft ids."""

    read: int
    stream: TextStream
    rendering: Rendering


class TranslatedProposer:
    """Shows another proposer each sequence in its own vocabulary.

    inner: sees views whose tokens are the draft's; its offers must be point masses.
    greedy: the inner draft always takes its likeliest token: the target's noise means nothing to it.
    append_only: the inner proposer relies on shown tokens never changing. A word may be split otherwise
    once it is longer; the sequence is then closed there and opened anew, and its prefix cache finds the rest.
    """

    name: ClassVar[str] = "translated"
    samples: ClassVar[bool] = False

    def __init__(
        self, inner: Proposer, ours: Tokenizer, theirs: Tokenizer, *, greedy: bool = True, append_only: bool = True
    ) -> None:
        self._inner = inner
        self._ours = ours
        self._theirs = theirs
        self._greedy = greedy
        self._append_only = append_only
        # A token such as <|im_start|> is shown to the draft where it knows it by the same name.
        self._specials = {
            token: text if theirs.token_id(text) is not None else "" for token, text in ours.specials.items()
        }
        self._their_specials = frozenset(theirs.specials)
        self._states: dict[int, _State] = {}

    def open(self, view: SequenceView) -> None:
        self.close(view.id)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        shown = {}
        for view in views:
            state = self._catch_up(view)
            if state.stream.whole and state.rendering.ids:
                shown[view.id] = (view, state)
        made = self._inner.propose([self._view(view, state) for view, state in shown.values()], knobs)
        offers = []
        for offer in made:
            view, state = shown[offer.sequence]
            tokens = self._back(view, self._text(state, offer.tokens))
            if tokens:
                offers.append(Offer(view.id, len(view.tokens), tokens, source=self.name))
        return offers

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing: the inner proposer would read the target's ids as its own. Views show what stood."""

    def close(self, sequence: int) -> None:
        if self._states.pop(sequence, None) is not None:
            self._inner.close(sequence)

    def _catch_up(self, view: SequenceView) -> _State:
        state = self._states.get(view.id)
        if state is None:
            prompt = view.tokens[: view.prompt_len]
            rendering = Rendering(self._theirs, self._prompt_text(prompt))
            state = self._states[view.id] = _State(view.prompt_len, self._ours.stream(prompt), rendering)
            self._inner.open(self._view(view, state))
        text = "".join(self._read(state.stream, token) for token in view.tokens[state.read :])
        state.read = len(view.tokens)
        if not state.rendering.extend(text) and self._append_only:
            self._inner.close(view.id)
            self._inner.open(self._view(view, state))
        return state

    def _read(self, stream: TextStream, token: int) -> str:
        special = self._specials.get(token)
        return stream.step(token) if special is None else stream.finish() + special

    def _prompt_text(self, prompt: Sequence[int]) -> str:
        """Text between special tokens decoded in one piece each."""
        text = ""
        run: list[int] = []
        for token in prompt:
            if token in self._specials:
                text += self._ours.decode(run) + self._specials[token]
                run = []
            else:
                run.append(token)
        return text + self._ours.decode(run)

    def _view(self, view: SequenceView, state: _State) -> SequenceView:
        """The same sequence as the inner proposer sees it."""
        rendering = state.rendering
        k = view.k + _MARGIN
        sampling = _in_any_words(view.sampling)
        return replace(
            view,
            tokens=rendering.ids,
            prompt_len=rendering.prompt_len,
            computed_len=max(0, len(rendering.ids) - 1),
            sampling=replace(sampling, temperature=0.0) if self._greedy else sampling,
            rule="coupled",  # no law is wanted
            k=k,
            room=k,
        )

    def _text(self, state: _State, drafted: Sequence[int]) -> str:
        """What the draft adds to the text, up to its first special token or half character."""
        stream = self._theirs.stream(state.rendering.ids)
        text = ""
        for token in drafted:
            if token in self._their_specials:
                break
            text += stream.step(token)
        return text

    def _back(self, view: SequenceView, text: str) -> tuple[int, ...]:
        """The target's ids of the whole words that `text` begins with, at most k."""
        certain = text[: word_start(text)]
        if not certain or "\N{REPLACEMENT CHARACTER}" in certain:
            return ()
        before = self._before(view.tokens)
        known = self._ours.decode(before)
        ids = self._continue(before, known, certain)
        if not ids or self._ours.decode([*before, *ids]) != known + certain:
            return ()
        return tuple(ids[: view.k])

    def _before(self, tokens: Sequence[int]) -> list[int]:
        """The newest known tokens, back to a special one, as many as encode to themselves."""
        newest = list(tokens[-_CONTEXTS[-1] :])
        after = next((at + 1 for at in range(len(newest) - 1, -1, -1) if newest[at] in self._specials), 0)
        newest = newest[after:]
        for size in _CONTEXTS:
            context = newest[-size:]
            if context and self._ours.encode_plain(self._ours.decode(context)) == context:
                return context
        return newest[-_CONTEXTS[0] :]

    def _continue(self, before: list[int], known: str, certain: str) -> list[int]:
        """Ids of `certain` after `before`; alone where a word runs across the seam."""
        together = self._ours.encode_plain(known + certain)
        if together[: len(before)] == before:
            return together[len(before) :]
        return self._ours.encode_plain(certain)


def _in_any_words(sampling: Sampling) -> Sampling:
    """What of it does not speak of tokens: ids and counts of one vocabulary mean nothing in another."""
    return Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )


class TranslatedSeq2Seq(TranslatedProposer):
    """An encoder-decoder with a vocabulary of its own."""

    name: ClassVar[str] = "seq2seq"
