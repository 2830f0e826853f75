"""Parameters out of range, or that this model or this configuration does not have, are refused by their names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.config import parse
from cluster.errors import ConfigError, RequestError
from cluster.request import MAX_BAD, MAX_BAD_LEN, Request, Sampling
from tests.fakes import FakeSetup, HashedLaws, fake_engine, run

SETUP = FakeSetup()
LAWS = HashedLaws(SETUP.vocab_size)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"allowed_ids": ()}, "allowed_ids"),
        ({"bad_ids": ((),)}, "bad_ids"),
        ({"bad_ids": ((1,) * (MAX_BAD_LEN + 1),)}, "bad_ids"),
        ({"bad_ids": ((1,),) * (MAX_BAD + 1)}, "bad_ids"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"thinking_tokens": -1, "think_end": (1,)}, "thinking_tokens"),
        ({"thinking_tokens": 3}, "think_end"),
        ({"thinking_tokens": 3, "think_end": (1,) * (MAX_BAD_LEN + 1)}, "think_end"),
        ({"think_end": (1,)}, "think_end"),
        ({"logits_processors": ("a", "a")}, "logits_processors"),
        ({"logits_processors": tuple(str(n) for n in range(17))}, "logits_processors"),
    ],
)
def test_a_field_out_of_range_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        Sampling(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("token", [-1, 12])
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("allowed_ids", lambda token: {"allowed_ids": (1, token)}),
        ("bad_ids", lambda token: {"bad_ids": ((1,), (2, token))}),
        ("think_end", lambda token: {"thinking_tokens": 4, "think_end": (1, token)}),
        ("stop_ids", lambda token: {"stop_ids": (token,)}),
    ],
)
def test_ids_the_model_does_not_have_are_named(param: str, fields: Any, token: int) -> None:
    engine = fake_engine(SETUP, LAWS)
    with pytest.raises(RequestError, match="ids are 0 to 11") as caught:
        engine.submit(Request("r", (1,), Sampling(**fields(token))))
    assert caught.value.param == param
    assert not engine.has_work


def test_min_tokens_is_cut_with_max_tokens_to_the_context() -> None:
    asked = Request("r", (1,) * 8, Sampling(500, temperature=0.0, min_tokens=400))
    told = run(fake_engine(replace(SETUP, max_context=20), LAWS), [asked])["r"]
    assert (len(told.tokens), told.finish) == (12, "length")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"scheduler": {"policy": "random"}}, "scheduler.policy"),
        ({"scheduler": {"fair": "perhaps"}}, "scheduler.fair"),
        ({"processors": ["a:b"]}, "processors"),
        ({"processors": {"mine": 3}}, "processors.mine"),
    ],
)
def test_configuration_that_is_wrong_is_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse(raw)
