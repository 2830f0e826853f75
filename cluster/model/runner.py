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
    """Computes a plan: moves what it says, then writes keys and values of every token, returns wanted logits.

    What belongs in slot s of a row goes to block row.blocks[s // block_tokens], offset s % block_tokens;
    attention of a token covers the slots of its own row up to its own. A tree's node sees the slots
    before its tree (`PlanRow.root`), its ancestors and itself; its position is row.positions'.
    """

    @property
    def vocab_size(self) -> int: ...

    def launch(self, plan: Plan) -> Flight: ...
