"""The bytes each token adds to a text, and which tokens begin with or contain given bytes.

Knows: how the decoders of tokenizer files write bytes (byte-level pieces, marked spaces, byte tokens).
Refuses to know: models, laws, and what anybody looks bytes up for.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")
_MARKED_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Lexicon:
    """spelled: bytes of token 0, 1, ...; empty for those that a text leaves out. Immutable."""

    def __init__(self, spelled: Sequence[bytes]) -> None:
        self._spelled = tuple(spelled)
        order = sorted(range(len(spelled)), key=lambda token: spelled[token])
        self._order = np.array(order, dtype=np.int64)
        self._sorted = [spelled[token] for token in order]
        self._joined = b"".join(spelled)
        self._ends = np.cumsum([len(piece) for piece in spelled])

    def __getitem__(self, token: int) -> bytes:
        """Ids that no token has (a model's padding) add nothing."""
        return self._spelled[token] if token < len(self._spelled) else b""

    def starting(self, head: bytes) -> npt.NDArray[np.int64]:
        """Ids of tokens whose bytes begin with `head`, which is not empty."""
        start = bisect_left(self._sorted, head)
        stop = bisect_right(self._sorted, head, lo=start, key=lambda piece: piece[: len(head)])
        return self._order[start:stop]

    def containing(self, part: bytes) -> npt.NDArray[np.int64]:
        """Ids of tokens that hold all of `part`, which is not empty, somewhere."""
        found = {
            token
            for place in _places(self._joined, part)
            if place + len(part) <= self._ends[token := int(np.searchsorted(self._ends, place, side="right"))]
        }
        return np.array(sorted(found), dtype=np.int64)


def read_lexicon(backend: tokenizers.Tokenizer) -> Lexicon:
    """What the backend's own decoder makes of each token in the middle of a text."""
    spell = _speller(backend)
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    spelled = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token in vocabulary.items():
        if token not in added:
            spelled[token] = spell(piece, token)
        elif not added[token].special:
            spelled[token] = added[token].content.encode()
    return Lexicon(spelled)


def _speller(backend: tokenizers.Tokenizer) -> Callable[[str, int], bytes]:
    """Bytes of one piece of the vocabulary and its id."""
    kinds = set(_kinds(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}))
    if "ByteLevel" in kinds:
        table = _byte_level()
        return lambda piece, _: bytes(map(table.__getitem__, piece)) if table.keys() >= set(piece) else piece.encode()
    if kinds & {"ByteFallback", "Metaspace"}:
        return lambda piece, _: _marked(piece)
    return lambda _, token: _after_another(backend, token)


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield str(decoder.get("type"))
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _byte_level() -> dict[str, int]:
    """The byte behind each character of byte-level pieces: printable Latin-1 as it is, the rest from 256 up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(moved)}


def _marked(piece: str) -> bytes:
    byte = _BYTE_TOKEN.match(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_MARKED_SPACE, " ").encode()


def _after_another(backend: tokenizers.Tokenizer, token: int) -> bytes:
    """A decoder of another kind is asked: what does the token add behind itself?"""
    once, twice = (str(backend.decode([token] * times, skip_special_tokens=True)) for times in (1, 2))
    return twice[len(once) :].encode() if twice.startswith(once) else once.encode()


def _places(text: bytes, part: bytes) -> Iterator[int]:
    """Where `part` occurs, occurrences that overlap included."""
    place = text.find(part)
    while place >= 0:
        yield place
        place = text.find(part, place + 1)
