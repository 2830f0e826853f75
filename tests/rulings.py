"""Acceptance rules called with nothing but what they read, and a place to plant a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from cluster.messages import DraftLaw
from cluster.request import RuleName
from cluster.verify import judge
from cluster.verify.rules.base import Facts, Ruling
from cluster.verify.rules.registry import RULES


def coupled(drafts: Sequence[int], own: Sequence[int]) -> Ruling:
    return RULES["coupled"].decide(Facts(drafts, own))


def ratio(drafts: Sequence[int], target_PV: torch.Tensor, law: DraftLaw | None, seed: int, round_: int) -> Ruling:
    return RULES["ratio"].decide(Facts(drafts, (), target_PV, law, seed, round_))


def block(drafts: Sequence[int], target_PV: torch.Tensor, law: DraftLaw | None, seed: int, round_: int) -> Ruling:
    return RULES["block"].decide(Facts(drafts, (), target_PV, law, seed, round_))


def plant(monkeypatch: pytest.MonkeyPatch, name: RuleName, decide: Callable[[Facts], Ruling]) -> None:
    """Have every judge rule by `decide` where it would rule by `name`."""
    monkeypatch.setattr(judge, "RULES", {**RULES, name: replace(RULES[name], decide=decide)})
