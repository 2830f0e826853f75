"""Every kind of proposer there is, over models and tokenizers that cost nothing.

Each entry of `KINDS` makes one for a target whose laws are known; adding a proposer is an entry here,
and the laws then hold it over everything a request may ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from cluster.draft.branching import Branching
from cluster.draft.candidates import Candidates
from cluster.draft.model import ModelProposer, QuantizedProposer
from cluster.draft.proposer import Proposer
from cluster.draft.recycling import RecyclingProposer
from cluster.draft.seq2seq import Seq2SeqProposer
from cluster.draft.suffix.proposer import SuffixProposer
from cluster.draft.suffix.trie import Limits, Mode, Wish
from cluster.draft.translate import TranslatedProposer, TranslatedSeq2Seq
from cluster.model.processors import Vocabulary
from cluster.text.tokenizer import Tokenizer
from tests.fakes import LETTERS, FakeRunner, FakeSetup, LawOf, Liar, OracleProposer, SampledProposer, fake_cache, ngram
from tests.remote import WILD, remote


@dataclass(frozen=True)
class Around:
    """What proposers are made from. near: laws close to the target's. far: others. answers: by prompt."""

    setup: FakeSetup
    near: LawOf
    far: LawOf
    answers: Mapping[tuple[int, ...], Sequence[int]] = field(default_factory=dict)

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.setup.eos_ids, LETTERS)


@dataclass
class FakeRecall:
    prompt: list[int]
    said: list[int] = field(default_factory=list)


class FakeSeq2Seq:
    """An encoder-decoder whose laws are those of a context: the prompt, then what the decoder read."""

    start_id = 0
    max_context = 1 << 20

    def __init__(self, law_of: LawOf, vocab_size: int) -> None:
        self._law_of = law_of
        self.vocab_size = vocab_size

    def read(self, prompt: list[int]) -> FakeRecall:
        return FakeRecall(list(prompt))

    def feed(self, recall: FakeRecall, tokens: list[int]) -> torch.Tensor:
        recall.said.extend(tokens)
        assert recall.said[0] == self.start_id
        return self._law_of([*recall.prompt, *recall.said[1:]]).float()

    def rewind(self, recall: FakeRecall, length: int) -> None:
        del recall.said[length:]


def drafting(
    around: Around,
    law_of: LawOf,
    *,
    kind: type[ModelProposer] = ModelProposer,
    blocks: int | None = None,
    max_context: int | None = None,
    candidates: Candidates = Candidates(),
    branching: Branching | None = None,
) -> ModelProposer:
    """A real model proposer over a fake model."""
    setup = around.setup
    blocks = blocks or setup.num_blocks
    runner = FakeRunner(law_of, setup.vocab_size, blocks, setup.block_tokens)
    cache_, context = fake_cache(setup, blocks), max_context or setup.max_context
    return kind(runner, cache_, context, candidates, vocabulary=around.vocabulary, branching=branching)


@cache
def alphabet(*merges: tuple[str, str]) -> Tokenizer:
    """Ids 0 to 5 read "a" to "e" and " "; merges make longer tokens."""
    pieces = [*"abcde ", *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE({piece: n for n, piece in enumerate(pieces)}, list(merges)))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, frozenset(), None)


def in_other_words(law_of: LawOf, vocab_size: int) -> LawOf:
    """Laws over a longer vocabulary: the ids beyond are as likely as those they start over with."""
    return lambda context: law_of([token % 6 for token in context])[torch.arange(vocab_size) % 6]


THEIRS = (("a", "b"), ("c", " "), ("ab", "d"))


def translated(around: Around, *, greedy: bool) -> Proposer:
    theirs = alphabet(*THEIRS)
    runner = FakeRunner(in_other_words(around.near, theirs.vocab_size), theirs.vocab_size, 64, 4)
    inner = ModelProposer(runner, fake_cache(FakeSetup(block_tokens=4), 64), 4 * around.setup.max_context)
    return TranslatedProposer(inner, alphabet(), theirs, greedy=greedy)


def translated_seq2seq(around: Around) -> Proposer:
    theirs = alphabet(*THEIRS)
    model = FakeSeq2Seq(in_other_words(around.near, theirs.vocab_size), theirs.vocab_size)
    inner = Seq2SeqProposer(model, 3)  # type: ignore[arg-type]
    return TranslatedSeq2Seq(inner, alphabet(), theirs, append_only=False)


def seq2seq(around: Around) -> Proposer:
    model = FakeSeq2Seq(around.near, around.setup.vocab_size)
    return Seq2SeqProposer(model, 3, vocabulary=around.vocabulary)  # type: ignore[arg-type]


def suffix(mode: Mode) -> Proposer:
    return SuffixProposer(Wish(limit=8, mode=mode), Limits(8, 400, 20), Limits(8, 400, 1))


KINDS: Mapping[str, Callable[[Around], Proposer]] = {
    "ngram": lambda around: ngram(),
    "suffix": lambda around: suffix("path"),
    "suffix, trees": lambda around: suffix("tree"),
    "recycling": lambda around: RecyclingProposer(60),
    "recycling, trees": lambda around: RecyclingProposer(60, successors=3),
    "model, near": lambda around: drafting(around, around.near),
    "model, far": lambda around: drafting(around, around.far),
    "model, few blocks": lambda around: drafting(around, around.near, blocks=max(2, around.setup.num_blocks // 2)),
    "model, short context": lambda around: drafting(around, around.near, max_context=16),
    "model, its own way": lambda around: drafting(
        around, around.near, candidates=Candidates(0.7, 4, 0.9, most=3, min_confidence=0.3)
    ),
    "model, trees": lambda around: drafting(around, around.far, branching=Branching(width=3)),
    "model, trees and few blocks": lambda around: drafting(
        around, around.near, branching=Branching(2, 10, 4), blocks=max(2, around.setup.num_blocks // 2)
    ),
    "quantized": lambda around: drafting(around, around.near, kind=QuantizedProposer),
    "seq2seq": seq2seq,
    "translated": lambda around: translated(around, greedy=True),
    "translated, warm": lambda around: translated(around, greedy=False),
    "translated seq2seq": translated_seq2seq,
    "remote": lambda around: remote(drafting(around, around.near)),
    "remote, wild": lambda around: remote(
        drafting(around, around.near), drafting(around, around.far), faults=WILD, seed=7
    ),
    "oracle": lambda around: OracleProposer(dict(around.answers)),
    "liar": lambda around: Liar(around.setup.vocab_size),
    "sampled": lambda around: SampledProposer((1 / around.setup.vocab_size,) * around.setup.vocab_size),
}
