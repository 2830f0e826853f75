"""A draft in another vocabulary: texts stay in step, and only certain tokens come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from cluster.draft.translate import Rendering, TranslatedProposer, word_start
from cluster.messages import Knobs, Offer, SequenceView, Verdict
from cluster.request import Sampling
from cluster.text.tokenizer import Tokenizer
from tests.tiny import IM_END, IM_START, make_tiny

ANSWER = " the cat and the dog returning, hello on and on; a world of errors and the end of the thing"


@pytest.fixture(scope="module")
def ours(tiny_llama: Path) -> Tokenizer:
    return Tokenizer.load(tiny_llama)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tiny(tmp_path_factory.mktemp("words"), words=True))


class Teller:
    """Knows what text comes; offers it in its own ids, and remembers what it was shown."""

    name: ClassVar[str] = "teller"
    samples: ClassVar[bool] = False

    def __init__(self, tokenizer: Tokenizer, story: str) -> None:
        self._tokenizer = tokenizer
        self._story = story
        self.shown: list[SequenceView] = []
        self.opened: list[int] = []
        self.closed: list[int] = []

    def open(self, view: SequenceView) -> None:
        self.opened.append(view.id)

    def propose(self, views: Sequence[SequenceView], knobs: Knobs) -> list[Offer]:
        offers = []
        for view in views:
            self.shown.append(replace(view, tokens=list(view.tokens)))
            known = self._tokenizer.decode(view.tokens)
            rest = self._tokenizer.encode_plain(self._story[len(known) :])
            offers.append(Offer(view.id, len(view.tokens), tuple(rest[: view.k]), source=self.name))
        return offers

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        raise AssertionError("the target's ids mean nothing to it")

    def close(self, sequence: int) -> None:
        self.closed.append(sequence)


def view(tokens: Sequence[int], prompt_len: int, k: int = 5) -> SequenceView:
    return SequenceView(0, list(tokens), prompt_len, len(tokens) - 1, Sampling(99), "ratio", "", None, k, 99)


def test_every_offer_is_what_the_target_would_say(ours: Tokenizer, theirs: Tokenizer) -> None:
    """Step through a text at every pace: whatever is offered is exactly how the text goes on."""
    assert not ours.same_as(theirs)
    prompt = ours.encode_plain("say it")
    answer = ours.encode_plain(ANSWER)
    for pace in (1, 2, 3, 5):
        teller = Teller(theirs, "say it" + ANSWER)
        made = TranslatedProposer(teller, ours, theirs)
        made.open(view(prompt, len(prompt)))
        drafted = 0
        for known in range(0, len(answer), pace):
            offers = made.propose([view(prompt + answer[:known], len(prompt))], Knobs())
            made.settle([])
            for offer in offers:
                assert offer.base_len == len(prompt) + known
                assert offer.law is None
                assert 1 <= len(offer.tokens) <= 5
                in_words = answer[known : known + len(offer.tokens)]
                assert ours.decode(offer.tokens) == ours.decode(in_words)
                drafted += list(offer.tokens) == in_words
        assert drafted >= 0.6 * len(range(0, len(answer), pace))
        for shown in teller.shown:
            assert theirs.decode(shown.tokens) == ("say it" + ANSWER)[: len(theirs.decode(shown.tokens))]
            assert shown.rule == "coupled"
            assert shown.sampling.greedy


def test_what_the_draft_sees_is_its_own_encoding_of_the_text(theirs: Tokenizer) -> None:
    """Encoded bit by bit or at once: the same ids, however long the text and wherever it was cut."""
    rendering = Rendering(theirs, "say it")
    long = ANSWER * 20
    done = 0
    for number in range(10_000):
        size = number % 7 + 1
        if done >= len(long):
            break
        grew = rendering.extend(long[done : done + size])
        assert isinstance(grew, bool)
        done += size
        if number % 50 == 0 or done >= len(long):
            assert rendering.ids[rendering.prompt_len :] == theirs.encode_plain(long[:done])
    assert len(rendering._tail) < 300


def test_a_changed_split_is_told(theirs: Tokenizer) -> None:
    rendering = Rendering(theirs, "x")
    assert rendering.extend(" ca")
    assert not rendering.extend("t")  # " cat" is one token, " ca" was two
    assert rendering.extend(" the")


@pytest.mark.parametrize(("text", "at"), [("", 0), ("abc", 0), (" abc", 0), ("ab c", 2), ("ab  c d", 5), ("ab  ", 2)])
def test_where_the_last_word_starts(text: str, at: int) -> None:
    assert word_start(text) == at


def test_an_unfinished_character_waits(ours: Tokenizer, theirs: Tokenizer) -> None:
    prompt = ours.encode_plain("go")
    wave = ours.encode_plain("\N{WAVING HAND SIGN}")
    assert len(wave) > 1
    made = TranslatedProposer(Teller(theirs, "go\N{WAVING HAND SIGN} the cat and the"), ours, theirs)
    made.open(view(prompt, len(prompt)))
    assert made.propose([view(prompt + wave[:1], len(prompt))], Knobs()) == []
    (offer,) = made.propose([view(prompt + wave, len(prompt))], Knobs())
    assert ours.decode(offer.tokens).startswith(" the")


def test_a_word_whose_end_is_unknown_is_not_offered(ours: Tokenizer, theirs: Tokenizer) -> None:
    prompt = ours.encode_plain("go")
    made = TranslatedProposer(Teller(theirs, "go the cat"), ours, theirs)
    made.open(view(prompt, len(prompt)))
    (offer,) = made.propose([view(prompt, len(prompt), k=9)], Knobs())
    assert ours.decode(offer.tokens) == " the"
    made = TranslatedProposer(Teller(theirs, "go the"), ours, theirs)
    made.open(view(prompt, len(prompt)))
    assert made.propose([view(prompt, len(prompt), k=9)], Knobs()) == []


def test_special_tokens_are_shown_by_name_and_never_drafted(ours: Tokenizer, theirs: Tokenizer) -> None:
    prompt = ours.encode_chat([{"role": "user", "content": "the cat"}])
    start, end = theirs.token_id(IM_START), theirs.token_id(IM_END)
    teller = Teller(theirs, "")
    made = TranslatedProposer(teller, ours, theirs)
    made.open(view(prompt, len(prompt)))
    assert made.propose([view(prompt, len(prompt))], Knobs()) == []
    shown = list(teller.shown[0].tokens)
    assert shown.count(start) == 2
    assert shown.count(end) == 1
    state = made._states[0]
    assert end is not None
    assert made._text(state, [*theirs.encode_plain(" the"), end, *theirs.encode_plain(" cat")]) == " the"


def test_the_inner_proposer_starts_anew_only_where_shown_ids_changed(ours: Tokenizer, theirs: Tokenizer) -> None:
    prompt = ours.encode_plain("x")
    pieces = [*ours.encode_plain(" ca"), *ours.encode_plain("t"), *ours.encode_plain(" the"), *ours.encode_plain(" on")]
    for append_only, reopened in ((True, 1), (False, 0)):
        teller = Teller(theirs, "x cat the on and")
        made = TranslatedProposer(teller, ours, theirs, append_only=append_only)
        made.open(view(prompt, len(prompt)))
        known = len(ours.encode_plain(" ca"))
        for length in range(known, len(pieces) + 1):
            made.propose([view(prompt + pieces[:length], len(prompt))], Knobs())
        assert (len(teller.opened), len(teller.closed)) == (1 + reopened, reopened)
        made.close(0)
        made.close(0)
        assert len(teller.closed) == 1 + reopened


def test_nothing_grows_over_a_thousand_requests(ours: Tokenizer, theirs: Tokenizer) -> None:
    prompt = ours.encode_plain("the cat")
    teller = Teller(theirs, "the cat and the dog")
    made = TranslatedProposer(teller, ours, theirs)
    for sequence in range(1000):
        shown = replace(view(prompt, len(prompt)), id=sequence)
        made.open(shown)
        if sequence % 2:
            made.propose([shown], Knobs())
        made.close(sequence)
    assert not made._states
    assert sorted(teller.opened) == sorted(teller.closed)
