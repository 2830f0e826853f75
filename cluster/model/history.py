"""The tokens of one sequence and the processors its sampling asks for, applied one position at a time.

Knows: which processors matter, and how drafts enter the past of the positions after them.
Refuses to know: what any processor does, who asks (the judge about drafts, a drafter about its next token).

Legend of shape suffixes: P positions of one row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from cluster.messages import Fault
from cluster.model.processors import ORDER, Failed, LogitsProcessor, Past, Setting, Vocabulary
from cluster.request import Sampling


class History:
    """The past of one sequence and the processors that look at it; those not wished for cost nothing."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        vocabulary: Vocabulary = Vocabulary(),
        plugged: Mapping[str, LogitsProcessor] = MappingProxyType({}),
    ) -> None:
        setting = Setting(tuple(prompt), sampling, vocabulary, plugged)
        made = [kind.of(setting) for kind in ORDER]
        self._processors = [processor for processor in made if processor is not None]
        self._masks = any(processor.masks for processor in self._processors)
        self._past = Past(setting.prompt)
        self._emitted = 0
        #: The first position of the last `apply` at which nothing can follow, and why.
        self.blocked: tuple[int, Fault] | None = None

    @property
    def matters(self) -> bool:
        return bool(self._processors)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens were emitted."""
        if self._processors:
            for token in tokens:
                self._past.push(token)
            self._emitted += len(tokens)

    def suppose(self, token: int) -> None:
        """A token was drafted: it counts until `catch_up`."""
        if self._processors:
            self._past.push(token)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Take back what was supposed, then everything known counts: `tokens`, prompt included."""
        while len(self._past.answer) > self._emitted:
            self._past.pop()
        self.extend(tokens[len(self._past.prompt) + self._emitted :])

    def apply(self, logits_PV: torch.Tensor, drafts: Sequence[int]) -> None:
        """Change the logits of P consecutive positions in place; drafts[:i] come before row i.

        From the first position at which nothing can follow (`blocked`) on, every token is left
        as likely as any other: those laws say nothing and must not be used.
        """
        self.blocked = None
        pushed = 0
        try:
            for slot in range(logits_PV.shape[0]):
                if slot:
                    self._past.push(drafts[slot - 1])
                    pushed += 1
                self._apply_one(logits_PV[slot])
        except Failed as failed:
            self.blocked = (pushed, failed.fault)
            logits_PV[pushed:] = 0.0
        finally:
            for _ in range(pushed):
                self._past.pop()

    def _apply_one(self, logits_V: torch.Tensor) -> None:
        for processor in self._processors:
            processor.apply(logits_V, self._past)
        if self._masks and not bool(logits_V.max() > float("-inf")):
            raise Failed(
                Fault("no token is possible here: allowed tokens, forbidden ones and min_tokens leave none; relax one")
            )
