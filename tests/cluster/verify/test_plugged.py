"""Logits processors by import path: found at start, or refused with the key that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError, RequestError
from cluster.messages import Knobs
from cluster.request import Request, Sampling
from cluster.verify.plugged import load_processors
from tests.fakes import FakeSetup, HashedLaws, fake_engine, run

MODULE = """
import torch

class Rules:
    @staticmethod
    def odd_only(seen, logits):
        logits[::2] = float("-inf")
        return logits

limit = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugged_rules.py").write_text(MODULE)
    (tmp_path / "plugged_broken.py").write_text("raise ValueError('at import')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("plugged_rules", "plugged_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_processor_is_found_and_named_by_a_request() -> None:
    plugged = load_processors({"odd": "plugged_rules:Rules.odd_only"})
    asked = [
        Request("odd", (1, 2), Sampling(12, ignore_eos=True, logits_processors=("odd",))),
        Request("any", (1, 2), Sampling(12, ignore_eos=True)),
    ]
    told = run(fake_engine(FakeSetup(), HashedLaws(12), plugged=plugged), asked)
    assert all(token % 2 for token in told["odd"].tokens)
    assert any(token % 2 == 0 for token in told["any"].tokens)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("plugged_rules", "write module:attribute"),
        (":odd", "write module:attribute"),
        ("plugged_rules:", "write module:attribute"),
        ("plugged_nowhere:odd", "cannot import 'plugged_nowhere'"),
        ("plugged_broken:odd", "ValueError: at import"),
        ("plugged_rules:Rules.even_only", "has no attribute 'Rules.even_only'"),
        ("plugged_rules:limit", "is a int, not something to call"),
    ],
)
def test_what_cannot_be_loaded_is_said_at_start(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^processors\.mine: ") as caught:
        load_processors({"mine": path})
    assert message in str(caught.value)


def test_a_name_that_is_not_configured_is_refused_with_those_that_are() -> None:
    engine = fake_engine(FakeSetup(), HashedLaws(12), plugged={"odd": lambda seen, logits: logits})
    with pytest.raises(RequestError, match="configured under processors: odd") as caught:
        engine.submit(Request("r", (1,), Sampling(4, logits_processors=("even",))))
    assert caught.value.param == "logits_processors"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "not a tensor of 12 logits"),
        (torch.zeros(11), r"returned (11,), not a tensor of 12 logits"),
        (torch.full((12,), float("nan")), "NaN or infinite"),
        (torch.tensor([0.0] * 11 + [float("inf")]), "NaN or infinite"),
        (torch.full((12,), float("-inf")), "no token is possible"),
    ],
)
def test_nonsense_ends_the_request_with_what_was_wrong(answer: object, message: str) -> None:
    engine = fake_engine(FakeSetup(), HashedLaws(12), plugged={"bad": lambda seen, logits: answer})
    told = run(engine, [Request("r", (1,), Sampling(4, logits_processors=("bad",)))])["r"]
    assert (told.tokens, told.finish) == ((), "error")
    assert told.deltas[-1].fault is not None
    assert message in told.deltas[-1].fault.message


def test_it_sees_the_tokens_before_each_position_and_a_copy_of_the_logits() -> None:
    seen: list[tuple[int, ...]] = []

    def watch(tokens: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tokens)
        logits.clone().zero_()
        return logits.double()

    setup = FakeSetup(knobs=Knobs(k=0, adaptive=False))
    sampling = Sampling(4, temperature=0.0, ignore_eos=True)
    plain = run(fake_engine(setup, HashedLaws(12)), [Request("r", (7, 8), sampling)])["r"].tokens
    asked = Request("r", (7, 8), Sampling(4, temperature=0.0, ignore_eos=True, logits_processors=("watch",)))
    told = run(fake_engine(setup, HashedLaws(12), plugged={"watch": watch}), [asked])["r"]
    assert told.tokens == plain
    assert seen == [(7, 8, *plain[:n]) for n in range(4)]
