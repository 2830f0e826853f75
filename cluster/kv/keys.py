"""The names of block contents: a hash chain over everything keys and values depend on.

Knows: which facts make two blocks interchangeable.
Refuses to know: block ids, tensors, where a block lies.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class KeyContext:
    """What every block of one engine has in common.

    layout: dtype and block size; fidelity: "exact", or the lossy codec the block went through.
    """

    model: str
    weights_version: int = 0
    adapter: str = ""
    layout: str = ""
    fidelity: str = "exact"


def root_key(context: KeyContext, salt: str) -> bytes:
    """The parent of a sequence's first block."""
    fields = (
        context.model,
        str(context.weights_version),
        context.adapter,
        salt,
        context.layout,
        context.fidelity,
    )
    return _digest(field.encode() for field in fields)


def child_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block of `tokens` whose predecessor's key is `parent`."""
    return _digest((parent, array("q", tokens).tobytes()))


def _digest(fields: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))  # length first: ("ab","c") is not ("a","bc")
        digest.update(field)
    return digest.digest()
