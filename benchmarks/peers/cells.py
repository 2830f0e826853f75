"""What is measured: cells, each one question to all contenders that take it, and the prompts of a turn.

Knows: prompt files, batches, contexts, draft lengths, which contenders a cell is for.
Refuses to know: engines, time.

    speed     code x1, chat x1, json x1, mixed x8, mixed x32, mixed x64: answers to real prompts, until they end
    latency   prompt 2000: the first token of a prompt of 2,000 tokens
    curves    batch n, context n, k n: decoding alone, answers as long as asked; k: real prompts, k at most n
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import Contender
from benchmarks.protocol import Prompt, read_prompts
from cluster.text.tokenizer import Tokenizer

KINDS = ("code", "chat", "json")
BATCHES = (8, 32, 64)
#: Of the curves.
CURVE_BATCHES, CONTEXTS, LENGTHS = (1, 2, 4, 8, 16, 32, 64), (128, 512, 2048, 8000), (0, 1, 2, 3, 5, 8, 12, 15)
#: New tokens of a curve's points, and the context its batches have.
_CURVE_TOKENS, _CURVE_CONTEXT, _LONG_PROMPT = 32, 128, 2000


@dataclass(frozen=True)
class Cell:
    """kind: a prompt file, "mixed", or "text" (running text cut to `context` tokens). whole: answers do not end early.

    wants: whether a contender is asked. ask: added to what it is asked. at: the point on a curve's axis.
    """

    part: str
    name: str
    kind: str
    batch: int
    tokens: int
    wants: Callable[[Contender], bool]
    context: int | None = None
    whole: bool = False
    ask: Mapping[str, Any] = field(default_factory=dict)
    at: int | None = None

    def takes(self, contender: Contender) -> bool:
        return self.batch <= contender.batch and self.wants(contender)


class Prompts:
    """Prompts in token ids for one tokenizer; every turn of a cell goes on where the last one stopped."""

    def __init__(self, data: Path, tokenizer: Tokenizer) -> None:
        self._by_kind = {
            kind: read_prompts(data, kind, tokenizer) for kind in KINDS if (data / f"{kind}.jsonl").is_file()
        }
        self._by_kind["mixed"] = list(_woven(list(self._by_kind.values())))
        #: Kinds there are files of.
        self.kinds = tuple(kind for kind in KINDS if kind in self._by_kind)

    @property
    def warm(self) -> list[int]:
        """What an engine is asked before anything is timed."""
        return list(self._by_kind["mixed"][0].ids)

    def of(self, cell: Cell, repeat: int) -> list[list[int]]:
        """The prompts of a cell's turn number `repeat`."""
        if cell.kind == "text":
            return [self._text(cell.context or 1, repeat * cell.batch + row) for row in range(cell.batch)]
        first = repeat * cell.batch
        return [list(prompt.ids) for prompt in islice(cycle(self._by_kind[cell.kind]), first, first + cell.batch)]

    def _text(self, tokens: int, turn: int) -> list[int]:
        """Prompts one behind the other, beginning at another one each turn."""
        every = self._by_kind["mixed"]
        start = 7 * turn % len(every)
        ids = (token for prompt in cycle([*every[start:], *every[:start]]) for token in prompt.ids)
        return list(islice(ids, tokens))


def cells(parts: Sequence[str], kinds: Sequence[str], tokens: int, *, pair: bool) -> list[Cell]:
    """The cells of a suite, the most wanted first. With a second model speed is asked of one stream."""
    made: list[Cell] = []
    if "speed" in parts:
        made += [Cell("speed", f"{kind} x1", kind, 1, tokens, _everyone) for kind in kinds]
    if "latency" in parts:
        made.append(Cell("latency", f"prompt {_LONG_PROMPT}", "text", 1, 2, _plain, context=_LONG_PROMPT, whole=True))
    if "speed" in parts and not pair:
        made += [Cell("speed", f"mixed x{batch}", "mixed", batch, tokens, _many) for batch in BATCHES]
    if "curves" in parts:
        made += list(_curves(kinds, tokens, pair=pair))
    return made


def _curves(kinds: Sequence[str], tokens: int, *, pair: bool) -> Iterator[Cell]:
    for batch in CURVE_BATCHES if not pair else ():
        yield Cell(
            "curves",
            f"batch {batch}",
            "text",
            batch,
            _CURVE_TOKENS,
            _plain,
            context=_CURVE_CONTEXT,
            whole=True,
            at=batch,
        )
    for context in CONTEXTS:
        yield Cell(
            "curves", f"context {context}", "text", 1, _CURVE_TOKENS, _plain, context=context, whole=True, at=context
        )
    for k in LENGTHS:
        yield Cell("curves", f"k {k}", kinds[0], 1, tokens, _drafts, ask={"speculation": {"k": k}}, at=k)


def _everyone(contender: Contender) -> bool:  # noqa: ARG001  # a cell's `wants`
    return True


def _plain(contender: Contender) -> bool:
    return contender.name.endswith("none")


def _many(contender: Contender) -> bool:
    """Those that are asked many prompts at once: one kind of weights, so that only engines differ."""
    return contender.weights == "bfloat16"


def _drafts(contender: Contender) -> bool:
    return contender.ours and not contender.ask and not _plain(contender)


def _woven(lists: Sequence[list[Prompt]]) -> Iterator[Prompt]:
    """One of each in turn, as far as the shortest goes."""
    for together in zip(*lists, strict=False):
        yield from together
