"""The protocol between the engine and whatever computes logits.

Knows: that a plan goes in and logits come out.
Refuses to know: sampling, acceptance, scheduling.

Legend of shape suffixes: N positions that want logits, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.messages import Plan


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way (or done). `logits_NV` is float32, rows in plan order, N = sum of `wants`."""

    plan: Plan
    logits_NV: torch.Tensor


class Runner(Protocol):
    """Computes a plan: writes the keys and values of every planned token, returns wanted logits.

    The keys and values of position p of a row go to block row.blocks[p // block_tokens], offset
    p % block_tokens; attention of a token at position p covers positions 0..p of its own row.
    """

    @property
    def vocab_size(self) -> int: ...

    def launch(self, plan: Plan) -> Flight: ...
