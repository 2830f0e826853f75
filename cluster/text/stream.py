"""The protocol of incremental detokenization, apart from any tokenizer that implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class TextStream(Protocol):
    """Turns token ids into text as they arrive."""

    def step(self, token: int) -> str:
        """Text that this token completes; empty while a character is incomplete."""

    def finish(self) -> str:
        """Whatever an incomplete character leaves behind."""


#: Opens a stream for an answer to the given prompt ids.
OpenStream = Callable[[Sequence[int]], TextStream]
