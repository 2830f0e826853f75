"""The wire: every message comes out as it went in, and nothing else comes out at all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.draft.verbs import LANGUAGE, Answer, Ask, Closed, Missing, Opened, Outcome, Row, Settled
from cluster.errors import BrokenInvariant, WireError
from cluster.messages import DraftLaw, Offer
from cluster.parallel.wire import Language
from cluster.request import Sampling

numbers = st.integers(-(2**63), 2**63 - 1)
ids = st.integers(0, 2**40)
tokens = st.lists(st.integers(0, 2**31), max_size=12).map(tuple)
chances = st.floats(0, 1)
samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 2**40),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.001, 1.0),
    logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    allowed_ids=st.none() | tokens.filter(bool),
    bad_ids=st.lists(tokens.filter(bool), max_size=2).map(tuple),
)


@st.composite
def laws(draw: st.DrawFn) -> DraftLaw:
    k, m = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    return DraftLaw(random.integers(0, 99, (k, m)), random.random((k, m)))


offers = st.builds(Offer, ids, ids, tokens, st.none() | laws(), st.text(max_size=8), ids, st.none() | tokens)
rows = st.builds(
    Row,
    ids,
    ids,
    tokens,
    ids,
    st.sampled_from(("coupled", "ratio", "block", "threshold", "typical")),
    st.none() | st.text(max_size=5),
    st.integers(0, 64),
    ids,
    ids,
)
messages = st.one_of(
    st.builds(Opened, ids, ids, st.text(max_size=9), samplings, tokens),
    st.builds(Ask, numbers, ids, ids, st.floats(0, 1e6), st.lists(rows, max_size=3).map(tuple)),
    st.builds(Settled, numbers, st.lists(st.builds(Outcome, ids, ids, tokens, ids), max_size=3).map(tuple)),
    st.builds(Closed, ids),
    st.builds(
        Answer,
        numbers,
        ids,
        st.lists(offers, max_size=3).map(tuple),
        st.lists(st.tuples(ids, ids), max_size=3).map(tuple),
    ),
    st.builds(Missing, tokens),
)
thorough = settings(max_examples=150, deadline=None, derandomize=True)


def same(one: object, two: object) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and one.dtype == two.dtype and np.array_equal(one, two)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(two) and all(same(getattr(one, name), getattr(two, name)) for name in names)
    if isinstance(one, tuple):
        return isinstance(two, tuple) and len(one) == len(two) and all(map(same, one, two))
    return one == two


@thorough
@given(messages)
def test_what_goes_in_comes_out(message: object) -> None:
    assert same(LANGUAGE.decode(LANGUAGE.encode(message)), message)


@thorough
@given(messages, st.data())
def test_a_cut_or_prolonged_message_is_refused(message: object, data: st.DataObject) -> None:
    encoded = LANGUAGE.encode(message)
    with pytest.raises(WireError):
        LANGUAGE.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(WireError):
        LANGUAGE.decode(encoded + b"\0")


@thorough
@given(messages, st.integers(0, 10**6), st.integers(1, 255), st.binary(max_size=80))
def test_garbage_is_refused_or_is_another_message(message: object, at: int, change: int, noise: bytes) -> None:
    """A changed byte may spell another sound message; it never raises anything else."""
    encoded = bytearray(LANGUAGE.encode(message))
    encoded[at % len(encoded)] ^= change
    for garbage in (bytes(encoded), noise, bytes(encoded[:14]) + noise):
        with contextlib.suppress(WireError):
            LANGUAGE.encode(LANGUAGE.decode(garbage))


def test_a_law_crosses_bit_for_bit() -> None:
    law = DraftLaw(np.array([[3, 1]]), np.array([[0.1 + 0.2, 1 - (0.1 + 0.2)]]))
    crossed = LANGUAGE.decode(LANGUAGE.encode(Answer(1, 0, (Offer(1, 2, (3,), law),), ())))
    assert crossed.offers[0].law.probs.tobytes() == law.probs.tobytes()


def test_a_field_more_is_another_language() -> None:
    one = dataclasses.make_dataclass("Word", [("letters", int)], frozen=True)
    two = dataclasses.make_dataclass("Word", [("letters", int), ("more", int)], frozen=True)
    three = dataclasses.make_dataclass("Word", [("letters", float)], frozen=True)
    assert len({Language([kind]).schema for kind in (one, two, three)}) == 3
    with pytest.raises(WireError, match="same release"):
        Language([two]).decode(Language([one]).encode(one(3)))


def test_fields_a_class_refuses_are_refused() -> None:
    sound = Opened(1, 2, "", Sampling(temperature=1.5), (1, 2))
    encoded = LANGUAGE.encode(sound)
    at = encoded.index(np.float64(1.5).tobytes())
    with pytest.raises(WireError, match="temperature"):
        LANGUAGE.decode(encoded[:at] + np.float64(-1.0).tobytes() + encoded[at + 8 :])


def test_what_has_no_form_is_a_mistake_of_the_writer() -> None:
    with pytest.raises(BrokenInvariant):
        Language([dataclasses.make_dataclass("Odd", [("thing", object)])])
    with pytest.raises(BrokenInvariant):
        LANGUAGE.encode(Closed(2**63))
    with pytest.raises(BrokenInvariant):
        LANGUAGE.encode("a text")


def test_every_form_there_is() -> None:
    @dataclasses.dataclass(frozen=True)
    class Inner:
        array: npt.NDArray[np.float64]

    kind = dataclasses.make_dataclass(
        "All",
        [
            ("flag", bool),
            ("choice", Literal["a", "b"]),
            ("pair", tuple[str, float]),
            ("table", Mapping[str, tuple[int, ...]]),
            ("either", Inner | str | None),
            ("many", tuple[Inner, ...]),
        ],
        frozen=True,
    )
    language = Language([kind])
    for either in (Inner(np.zeros((2, 0))), "text", None):
        value = kind(True, "b", ("x", -0.5), {"k": (1, 2)}, either, (Inner(np.ones((1, 2, 3))),))
        assert same(language.decode(language.encode(value)), value)
