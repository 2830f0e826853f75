"""The code of docs/adding-a-proposer.md is a proposer: it runs in an engine and keeps its promises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cluster.draft.first import FirstOffer
from cluster.request import Request, Sampling
from tests.fakes import FakeSetup, HashedLaws, fake_engine, run

PAGE = (Path(__file__).parent.parent / "docs/adding-a-proposer.md").read_text(encoding="utf-8")
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def block(name: str) -> dict[str, Any]:
    """What the page's block of this name defines."""
    found = re.findall(rf"^```python {name}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    names: dict[str, Any] = {"__name__": f"page_{name}"}
    exec(compile(found[0], f"docs/adding-a-proposer.md ({name})", "exec", dont_inherit=True), names)
    return names


def echo(skip: int = 0) -> Any:
    return block("proposer")["EchoProposer"](skip)


def parrot(context: Sequence[int]) -> torch.Tensor:
    """A target that says its prompt again, over and over."""
    logits = torch.zeros(12)
    logits[context[-len(PROMPT)]] = 9.0
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("laws", [HashedLaws(12), parrot])
def test_it_changes_no_token(laws: Any, temperature: float) -> None:
    asked = [
        Request(str(n), PROMPT, Sampling(max_tokens=20, temperature=temperature, seed=n, ignore_eos=True))
        for n in range(4)
    ]
    plain = run(fake_engine(FakeSetup(), laws), asked)
    drafted = run(fake_engine(FakeSetup(), laws, [echo()]), asked)
    assert {name: answer.tokens for name, answer in drafted.items()} == {n: a.tokens for n, a in plain.items()}


def test_its_drafts_stand_where_the_prompt_comes_again() -> None:
    told = run(fake_engine(FakeSetup(), parrot, [echo()]), [Request("r", PROMPT, Sampling(len(PROMPT), 0.0))])["r"]
    statistics = told.deltas[-1].statistics
    assert told.tokens == PROMPT
    assert statistics.accepted == statistics.drafted > 4


def test_it_forgets_what_is_closed() -> None:
    proposer = echo()
    engine = fake_engine(FakeSetup(), HashedLaws(12), [proposer])
    for number in range(1000):
        run(engine, [Request(str(number), PROMPT, Sampling(max_tokens=1))])
    assert not proposer._at
    assert FirstOffer([proposer]).names == ("echo",)


def test_its_configuration_refuses_what_it_does_not_know() -> None:
    draft = block("config")["EchoDraft"]
    assert draft(kind="echo").skip == 0
    for wrong in ({"kind": "echo", "skip": -1}, {"kind": "echo", "skp": 1}, {"kind": "ngram"}):
        with pytest.raises(ValidationError):
            draft(**wrong)


def test_the_case_names_what_the_page_defines() -> None:
    assert "case EchoDraft():\n            return EchoProposer(draft.skip)" in PAGE
