"""The compiled suffix trie: cluster/kernels/suffix.cpp behind the verbs of `Trie`.

Knows: the C interface, and when to hand memory back.
Refuses to know: the structure behind it.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import ClassVar

from cluster.draft.suffix.plain import PlainTrie
from cluster.draft.suffix.trie import Draft, Limits, Sizes, Trie, Wish
from cluster.errors import BrokenInvariant
from cluster.kernels.compile import compile_library, say_nothing

_handle, _int32, _int64, _double = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double


class _Wish(ctypes.Structure):
    _fields_: ClassVar = [
        ("limit", _int32),
        ("factor", _double),
        ("offset", _double),
        ("min_prob", _double),
        ("tree", _int32),
    ]


_Int32s, _Doubles = ctypes.POINTER(_int32), ctypes.POINTER(_double)
#: Entry points: what they return and take.
_ENTRIES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "trie_create": (_handle, (_int32, _int64, _int64)),
    "trie_destroy": (None, (_handle,)),
    "trie_start": (_int32, (_handle, _int64)),
    "trie_append": (_int32, (_handle, _handle, _int64)),
    "trie_stop": (_int32, (_handle,)),
    "trie_speculate": (
        _int32,
        (_handle, _int64, _handle, _int32, ctypes.POINTER(_Wish), _Int32s, _Int32s, _Doubles, _Doubles, _Int32s),
    ),
    "trie_count": (_int64, (_handle, _int64, _handle, _int32)),
    "trie_has": (_int32, (_handle, _int64)),
    "trie_sizes": (None, (_handle, ctypes.POINTER(_int64))),
}


class NativeTrie:
    """See `Trie`. Raises MemoryError where the machine has no more."""

    def __init__(self, library: ctypes.CDLL, limits: Limits) -> None:
        self._library = library
        self._limits = limits
        self._handle = library.trie_create(limits.depth, limits.tokens, limits.sequences)
        if not self._handle:
            raise MemoryError
        self._entering = False
        self._free = weakref.finalize(self, library.trie_destroy, self._handle)

    def start(self, key: int) -> None:
        if self._entering:
            raise BrokenInvariant("a sequence is entering already")
        self._entering = True
        self._sure(self._library.trie_start(self._handle, key))

    def append(self, tokens: Sequence[int]) -> None:
        if not self._entering:
            raise BrokenInvariant("no sequence is entering")
        packed = array("i", tokens)
        self._sure(self._library.trie_append(self._handle, packed.buffer_info()[0], len(packed)))

    def stop(self) -> None:
        if not self._entering:
            raise BrokenInvariant("no sequence is entering")
        self._entering = False
        self._sure(self._library.trie_stop(self._handle))

    def speculate(self, key: int, context: Sequence[int], wish: Wish) -> Draft:
        packed = array("i", context[-self._limits.depth :])
        tokens, parents, probs = (_int32 * wish.limit)(), (_int32 * wish.limit)(), (_double * wish.limit)()
        score, match = _double(), _int32()
        asked = _Wish(wish.limit, wish.factor, wish.offset, wish.min_prob, wish.mode == "tree")
        size = self._sure(
            self._library.trie_speculate(
                self._handle, key, packed.buffer_info()[0], len(packed), asked, tokens, parents, probs, score, match
            )
        )
        return Draft(tuple(tokens[:size]), tuple(parents[:size]), tuple(probs[:size]), score.value, match.value)

    def count(self, key: int, run: Sequence[int]) -> int:
        packed = array("i", run)
        return int(self._library.trie_count(self._handle, key, packed.buffer_info()[0], len(packed)))

    def holds(self, key: int) -> bool:
        return bool(self._library.trie_has(self._handle, key))

    @property
    def sizes(self) -> Sizes:
        out = (_int64 * 5)()
        self._library.trie_sizes(self._handle, out)
        return Sizes(*out)

    def close(self) -> None:
        self._free()

    def _sure(self, result: int) -> int:
        if result < 0:
            raise MemoryError
        return result


class TrieMaker:
    """Makes tries: compiled ones where this machine can, plain ones that hold less elsewhere."""

    def __init__(self, announce: Callable[[], None] = say_nothing) -> None:
        self._library = compile_library("suffix", "suffix_nodes.h", "suffix_window.h", announce=announce)
        if self._library is not None:
            for name, (result, parameters) in _ENTRIES.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, parameters

    @property
    def native(self) -> bool:
        return self._library is not None

    def make(self, limits: Limits) -> Trie:
        if self._library is None:
            return PlainTrie(limits.plain)
        return NativeTrie(self._library, limits)
