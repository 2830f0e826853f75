"""Stop strings over text that arrives in pieces.

Knows: which text may be shown, and when an answer has to end.
Refuses to know: tokens, tokenizers, how pieces were made.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Releases text that can no longer become part of a stop string.

    The earliest stop string to be completed ends the text; it is shown itself only with `include`.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Add a piece; returns what may be shown now."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        self._held += piece
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            end, at = min(found)  # the earliest end, as if the text came one character at a time
            return self._release(end if self._include else at, keep=False)
        return self._release(len(self._held) - self._undecided())

    def finish(self) -> str:
        """The answer ended otherwise: whatever was held back may be shown."""
        return self._release(len(self._held))

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0

    def _release(self, upto: int, *, keep: bool = True) -> str:
        shown, rest = self._held[:upto], self._held[upto:]
        self._held = rest if keep else ""
        return shown
