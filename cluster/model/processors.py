"""What changes the target's logits given the tokens before a position: one class a wish, applied in one order.

Knows: how one position's logits change given what came before it.
Refuses to know: drafts' quality and acceptance, temperature and cuts; raw log-probabilities are read elsewhere.

A processor keeps no state of its own: it sees `Past`, the tokens before one position, and changes
that position's logits. What holds one token at a time therefore holds inside a draft, after a
preemption and on another machine. Both the judge and the drafters apply them, so they lie below both.
Adding one is a class with `of` and `apply`, named in `ORDER`.

Legend of shape suffixes: P positions of one row, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, Self

import numpy as np
import torch

from cluster.messages import Fault
from cluster.request import Sampling
from cluster.text.lexicon import Lexicon

#: Plugged in by import path: (tokens before the position, prompt included; float32 [V]) -> float32 [V].
#: A pure function: called once for each position, drafts included, in any order, more than once after a preemption.
LogitsProcessor = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Past:
    """The tokens before one position. Read it, do not write to it."""

    prompt: tuple[int, ...]
    answer: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)  # of `answer`

    def push(self, token: int) -> None:
        self.answer.append(token)
        self.counts[token] += 1

    def pop(self) -> None:
        token = self.answer.pop()
        self.counts[token] -= 1
        if not self.counts[token]:
            del self.counts[token]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model's tokens are, beyond numbers.

    eos_ids: those that end an answer. lexicon: their bytes; None where nobody reads text.
    """

    eos_ids: frozenset[int] = frozenset()
    lexicon: Lexicon | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What processors are made from. plugged: processors by name."""

    prompt: tuple[int, ...]
    sampling: Sampling
    vocabulary: Vocabulary = Vocabulary()
    plugged: Mapping[str, LogitsProcessor] = field(default_factory=lambda: MappingProxyType({}))


class Processor(Protocol):
    """One wish. `masks`: whether it may make tokens impossible."""

    masks: bool

    @classmethod
    def of(cls, setting: Setting) -> Self | None:
        """The processor, or None where nothing was wished for."""

    def apply(self, logits_V: torch.Tensor, past: Past) -> None:
        """Change one position's logits in place. Raises Failed."""


class Failed(Exception):
    """A processor cannot say what comes next: the request ends here."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class Repetition:
    """Divides (or multiplies) the logits of tokens seen in prompt or answer. Source: arXiv 1909.05858."""

    masks = False

    def __init__(self, penalty: float, prompt: Sequence[int]) -> None:
        self._penalty = penalty
        self._prompt = frozenset(prompt)

    @classmethod
    def of(cls, setting: Setting) -> Self | None:
        penalty = setting.sampling.repetition_penalty
        return None if penalty == 1.0 else cls(penalty, setting.prompt)

    def apply(self, logits_V: torch.Tensor, past: Past) -> None:
        index = torch.tensor(sorted(self._prompt | past.counts.keys()), device=logits_V.device)
        values = logits_V[index]
        logits_V[index] = torch.where(values > 0, values / self._penalty, values * self._penalty)


class Frequency:
    """Subtracts once for tokens in the answer and again for each time. Source: the OpenAI API reference."""

    masks = False

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency

    @classmethod
    def of(cls, setting: Setting) -> Self | None:
        presence, frequency = setting.sampling.presence_penalty, setting.sampling.frequency_penalty
        return cls(presence, frequency) if presence or frequency else None

    def apply(self, logits_V: torch.Tensor, past: Past) -> None:
        if past.counts:
            index = torch.tensor(list(past.counts.keys()), device=logits_V.device)
            times = torch.tensor(list(past.counts.values()), dtype=logits_V.dtype, device=logits_V.device)
            logits_V[index] -= self._presence + self._frequency * times


class Bias:
    """Adds a number to some logits."""

    masks = False

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._index = torch.tensor(list(bias.keys()))
        self._bias = torch.tensor(list(bias.values()))

    @classmethod
    def of(cls, setting: Setting) -> Self | None:
        return cls(setting.sampling.logit_bias) if setting.sampling.logit_bias else None

    def apply(self, logits_V: torch.Tensor, past: Past) -> None:  # noqa: ARG002
        logits_V[self._index.to(logits_V.device)] += self._bias.to(logits_V)


class Plugged:
    """Processors of whoever runs the server. What they get wrong ends the request that named them."""

    masks = True

    def __init__(self, functions: Mapping[str, LogitsProcessor]) -> None:
        self._functions = functions

    @classmethod
    def of(cls, setting: Setting) -> Self | None:
        names = setting.sampling.logits_processors
        return cls({name: setting.plugged[name] for name in names}) if names else None

    def apply(self, logits_V: torch.Tensor, past: Past) -> None:
        tokens = (*past.prompt, *past.answer)
        for name, function in self._functions.items():
            logits_V.copy_(_called(name, function, tokens, logits_V))


class Allowed:
    """Only these tokens are possible."""

    masks = True

    def __init__(self, ids: Sequence[int]) -> None:
        self._index = torch.tensor(sorted(set(ids)))

    @classmethod
    def of(cls, setting: Setting) -> Self | None:
        ids = setting.sampling.allowed_ids
        return None if ids is None else cls(ids)

    def apply(self, logits_V: torch.Tensor, past: Past) -> None:  # noqa: ARG002
        index = self._index.to(logits_V.device)
        kept = logits_V[index]
        logits_V.fill_(float("-inf"))
        logits_V[index] = kept


class Bad:
    """Sequences that the answer never completes; those that begin in the prompt are not meant."""

    masks = True

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._sequences = tuple((list(sequence[:-1]), sequence[-1]) for sequence in sequences)

    @classmethod
    def of(cls, setting: Setting) -> Self | None:
        return cls(setting.sampling.bad_ids) if setting.sampling.bad_ids else None

    def apply(self, logits_V: torch.Tensor, past: Past) -> None:
        answer = past.answer
        last = [end for begin, end in self._sequences if not begin or answer[-len(begin) :] == begin]
        if last:
            logits_V[last] = float("-inf")


class BadWords:
    """Text that never appears: whichever token would complete a word, however it is cut, is impossible.

    What was said before the answer is not meant, and tokens without text change nothing.
    """

    masks = True

    def __init__(self, words: Sequence[bytes], lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._whole = [lexicon.containing(word) for word in words]
        self._longest = max(map(len, words)) - 1  # bytes of the answer that may begin a word
        rests: dict[bytes, list[bytes]] = {}
        for word in words:
            for cut in range(1, len(word)):
                rests.setdefault(word[:cut], []).append(word[cut:])
        #: Ids that complete a word, by the bytes before them.
        self._completing = {begin: [lexicon.starting(rest) for rest in ends] for begin, ends in rests.items()}

    @classmethod
    def of(cls, setting: Setting) -> Self | None:
        words, lexicon = setting.sampling.bad_words, setting.vocabulary.lexicon
        if not words or lexicon is None:
            return None
        return cls([word.encode() for word in words], lexicon)

    def apply(self, logits_V: torch.Tensor, past: Past) -> None:
        tail = self._tail(past.answer)
        found = list(self._whole)
        for size in range(1, len(tail) + 1):
            found.extend(self._completing.get(tail[-size:], ()))
        if found:
            logits_V[torch.from_numpy(np.concatenate(found)).to(logits_V.device)] = float("-inf")

    def _tail(self, answer: Sequence[int]) -> bytes:
        tail = b""
        for token in reversed(answer):
            if len(tail) >= self._longest:
                break
            tail = self._lexicon[token] + tail
        return tail[max(0, len(tail) - self._longest) :]


class NoEnd:
    """No token that ends the answer before min_tokens others."""

    masks = True

    def __init__(self, min_tokens: int, ends: frozenset[int]) -> None:
        self._min_tokens = min_tokens
        self._ends = sorted(ends)

    @classmethod
    def of(cls, setting: Setting) -> Self | None:
        least, ends = setting.sampling.min_tokens, setting.sampling.ends(setting.vocabulary.eos_ids)
        return cls(least, ends) if least and ends else None

    def apply(self, logits_V: torch.Tensor, past: Past) -> None:
        if len(past.answer) < self._min_tokens:
            logits_V[self._ends] = float("-inf")


class Thinking:
    """After a budget of tokens without the end mark, the end mark is all that is possible, whatever else was asked."""

    masks = True

    def __init__(self, budget: int, mark: tuple[int, ...]) -> None:
        self._budget = budget
        self._mark = mark

    @classmethod
    def of(cls, setting: Setting) -> Self | None:
        budget = setting.sampling.thinking_tokens
        return None if budget is None else cls(budget, setting.sampling.think_end)

    def apply(self, logits_V: torch.Tensor, past: Past) -> None:
        place = len(past.answer) - self._budget
        if 0 <= place < len(self._mark) and not self._ended(past.answer):
            logits_V.fill_(float("-inf"))
            logits_V[self._mark[place]] = 0.0

    def _ended(self, answer: Sequence[int]) -> bool:
        """Whether the mark stands within the budget."""
        mark = list(self._mark)
        return any(answer[at : at + len(mark)] == mark for at in range(self._budget - len(mark) + 1))


#: Every processor, in the order in which they apply: what forbids comes after what only weighs.
ORDER: tuple[type[Processor], ...] = (Repetition, Frequency, Bias, Plugged, Allowed, Bad, BadWords, NoEnd, Thinking)


def _called(name: str, function: LogitsProcessor, tokens: tuple[int, ...], logits_V: torch.Tensor) -> torch.Tensor:
    """What a plugged-in processor makes of a copy of the logits. Raises Failed."""
    try:
        told: object = function(tokens, logits_V.clone())
    except Exception as error:  # foreign code, of which nothing is known: its failure is this request's alone
        raise _failed(name, f"raised {type(error).__name__}: {error}") from error
    if not isinstance(told, torch.Tensor) or told.shape != logits_V.shape:
        wanted = f"a tensor of {logits_V.shape[0]} logits"
        raise _failed(
            name, f"returned {tuple(told.shape) if isinstance(told, torch.Tensor) else type(told)}, not {wanted}"
        )
    told = told.to(logits_V)
    if not bool(told.max() < float("inf")):  # also catches NaN
        raise _failed(name, "returned a logit that is NaN or infinite; only -inf is allowed, for impossible tokens")
    return told


def _failed(name: str, what: str) -> Failed:
    return Failed(Fault(f"logits processor {name!r} {what}", "logits_processors"))
