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
        #: Positions of the last `apply` at which nothing can follow, and why.
        self.blocked: Mapping[int, Fault] = MappingProxyType({})

    @property
    def matters(self) -> bool:
        return bool(self._processors)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens were emitted."""
        if self._processors:
            for token in tokens:
                self._past.push(token)

    def suppose(self, token: int) -> None:
        """A token was drafted: it counts until `catch_up`."""
        if self._processors:
            self._past.push(token)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Count what is known (`tokens`, prompt included) and nothing else: no draft, nothing once thought known."""
        if not self._processors:
            return
        known, past = list(tokens[len(self._past.prompt) :]), self._past
        while past.answer != known[: len(past.answer)]:
            past.pop()
        self.extend(known[len(past.answer) :])

    def apply(self, logits_PV: torch.Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Change the logits of P positions in place; paths[i] are the supposed tokens before row i.

        Where nothing can follow (`blocked`), every token is left as likely as any other: that law
        says nothing and must not be used, nor those of positions behind it.
        """
        blocked: dict[int, Fault] = {}
        supposed: list[int] = []
        for slot, path in enumerate(paths):
            self._go(supposed, path)
            try:
                self._apply_one(logits_PV[slot])
            except Failed as failed:
                blocked[slot] = failed.fault
                logits_PV[slot] = 0.0
        self._go(supposed, ())
        self.blocked = blocked

    def _go(self, supposed: list[int], path: Sequence[int]) -> None:
        """Make the past that of `path`, where it is that of `supposed`: what the two share stays."""
        shared = 0
        while shared < min(len(supposed), len(path)) and supposed[shared] == path[shared]:
            shared += 1
        while len(supposed) > shared:
            supposed.pop()
            self._past.pop()
        for token in path[shared:]:
            supposed.append(token)
            self._past.push(token)

    def _apply_one(self, logits_V: torch.Tensor) -> None:
        for processor in self._processors:
            processor.apply(logits_V, self._past)
        if self._masks and not bool(logits_V.max() > float("-inf")):
            raise Failed(
                Fault("no token is possible here: allowed tokens, forbidden ones and min_tokens leave none; relax one")
            )
