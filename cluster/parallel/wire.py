"""Values as bytes, without pickle: a language is a list of frozen dataclasses, encoded by their annotations.

Knows: how integers, floats, texts, arrays and dataclasses of these are laid out, and how to refuse what is not.
Refuses to know: what any message means, and how bytes travel.

    message = magic u32 | schema u64 | kind u16 | fields in the order of the class, little-endian
    int      int64                      str      u32 length, utf-8
    float    float64                    T | None u8 flag, then T
    bool     u8, 0 or 1                 tuple[T, ...], Sequence[T]   u32 length, items (ints: one int64 array)
    array    u8 dims, u32 each, data    Mapping[K, V]                u32 length, pairs

The schema is a hash of every class, field and type: two processes that would read the same bytes
differently do not understand each other at all, and say so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from cluster.errors import BrokenInvariant, OutriderError, WireError

_MAGIC = 0x0D1A57E2
_HEADER = struct.Struct("<IQH")
_INT, _FLOAT, _LENGTH, _BYTE = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<I"), struct.Struct("<B")
_MAX_DIMS = 4

Write = Callable[[bytearray, Any], None]


class _Cursor:
    """Bytes being read; never past their end."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, count: int) -> memoryview:
        end = self._at + count
        if end > len(self._data):
            raise WireError(f"a message ends after {len(self._data)} bytes where {end} are announced")
        taken = memoryview(self._data)[self._at : end]
        self._at = end
        return taken

    def length(self, least: int = 1) -> int:
        """A count of items of at least `least` bytes each: never more than could follow."""
        (count,) = _LENGTH.unpack(self.take(_LENGTH.size))
        if count * least > len(self._data) - self._at:
            raise WireError(f"a message announces {count} items and has {len(self._data) - self._at} bytes left")
        return int(count)

    @property
    def finished(self) -> bool:
        return self._at == len(self._data)


Read = Callable[[_Cursor], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """How one type is written and read. `least`: bytes that even its smallest value takes."""

    write: Write
    read: Read
    least: int


class Language:
    """The messages two processes may exchange: `encode` any instance of `kinds`, `decode` what arrives."""

    def __init__(self, kinds: Sequence[type]) -> None:
        self._kinds = tuple(kinds)
        self._numbers = {kind: number for number, kind in enumerate(self._kinds)}
        self._forms = [_form(kind) for kind in self._kinds]
        described = "\n".join(_describe(kind) for kind in self._kinds)
        self.schema = int.from_bytes(hashlib.blake2b(described.encode(), digest_size=8).digest(), "little")

    def encode(self, message: object) -> bytes:
        """Raises BrokenInvariant on a value that does not fit its own annotations."""
        number = self._numbers.get(type(message))
        if number is None:
            raise BrokenInvariant(f"{type(message).__name__} is no message of this language")
        out = bytearray(_HEADER.pack(_MAGIC, self.schema, number))
        try:
            self._forms[number].write(out, message)
        except (struct.error, OverflowError, TypeError, ValueError, AttributeError) as error:
            raise BrokenInvariant(f"{type(message).__name__} cannot be written: {error}") from error
        return bytes(out)

    def decode(self, data: bytes) -> Any:
        """The message that `data` is, whole. Raises WireError on anything else."""
        if len(data) < _HEADER.size:
            raise WireError(f"a message of {len(data)} bytes is too short to be one")
        magic, schema, number = _HEADER.unpack_from(data)
        if magic != _MAGIC or schema != self.schema:
            raise WireError("the peer speaks another version: run the same release on both sides")
        if number >= len(self._forms):
            raise WireError(f"there is no message of kind {number}")
        cursor = _Cursor(data, _HEADER.size)
        try:
            message = self._forms[number].read(cursor)
        except (struct.error, UnicodeDecodeError, OverflowError, TypeError, ValueError) as error:
            raise WireError(f"a {self._kinds[number].__name__} cannot be read: {error}") from error
        if not cursor.finished:
            raise WireError(f"bytes follow the end of a {self._kinds[number].__name__}")
        return message


def _form(hint: Any) -> _Form:
    """The form of an annotation. Raises BrokenInvariant for one that has none."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record(hint)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        return _literal(args)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return _fixed([_form(arg) for arg in args])
    if origin in (tuple, Sequence):
        return _INTS if args[0] is int else _many(_form(args[0]))
    if origin is Mapping:
        return _mapping(_fixed([_form(arg) for arg in args]))
    if origin is np.ndarray:
        return _array(np.dtype(get_args(args[1])[0]))
    raise BrokenInvariant(f"the wire has no form for {hint}")


def _describe(hint: Any) -> str:
    """A text that differs where the bytes would."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        inner = ", ".join(f"{field.name}: {_describe(hints[field.name])}" for field in dataclasses.fields(hint))
        return f"{hint.__name__}({inner})"
    args = [arg for arg in get_args(hint) if arg is not Ellipsis]
    if args and get_origin(hint) is not Literal:
        return f"{get_origin(hint)}[{', '.join(_describe(arg) for arg in args)}]"
    return str(hint)


def _packed(shape: struct.Struct, convert: Callable[[Any], Any]) -> _Form:
    def write(out: bytearray, value: Any) -> None:
        out += shape.pack(value)

    return _Form(write, lambda cursor: convert(shape.unpack(cursor.take(shape.size))[0]), shape.size)


def _bool(value: int) -> bool:
    if value > 1:
        raise ValueError(f"{value} is neither true nor false")
    return value == 1


def _text() -> _Form:
    def write(out: bytearray, value: Any) -> None:
        data = value.encode()
        out += _LENGTH.pack(len(data)) + data

    return _Form(write, lambda cursor: str(cursor.take(cursor.length()), "utf-8"), _LENGTH.size)


def _ints() -> _Form:
    """Integers in one array: token ids are most of what travels."""

    def write(out: bytearray, value: Any) -> None:
        out += _LENGTH.pack(len(value)) + np.asarray(value, "<i8").tobytes()

    def read(cursor: _Cursor) -> tuple[int, ...]:
        return tuple(np.frombuffer(cursor.take(8 * cursor.length(8)), "<i8").tolist())

    return _Form(write, read, _LENGTH.size)


def _many(item: _Form) -> _Form:
    def write(out: bytearray, value: Any) -> None:
        out += _LENGTH.pack(len(value))
        for each in value:
            item.write(out, each)

    def read(cursor: _Cursor) -> tuple[Any, ...]:
        return tuple(item.read(cursor) for _ in range(cursor.length(max(1, item.least))))

    return _Form(write, read, _LENGTH.size)


def _fixed(items: Sequence[_Form]) -> _Form:
    def write(out: bytearray, value: Any) -> None:
        for item, each in zip(items, value, strict=True):
            item.write(out, each)

    return _Form(write, lambda cursor: tuple(item.read(cursor) for item in items), sum(item.least for item in items))


def _mapping(pair: _Form) -> _Form:
    pairs = _many(pair)
    return _Form(
        lambda out, value: pairs.write(out, tuple(value.items())), lambda cursor: dict(pairs.read(cursor)), pairs.least
    )


def _literal(allowed: Sequence[Any]) -> _Form:
    def write(out: bytearray, value: Any) -> None:
        out += _BYTE.pack(allowed.index(value))

    def read(cursor: _Cursor) -> Any:
        (number,) = cursor.take(1)
        if number >= len(allowed):
            raise ValueError(f"there are {len(allowed)} choices, not {number + 1}")
        return allowed[number]

    return _Form(write, read, 1)


def _union(args: Sequence[Any]) -> _Form:
    """One of several types, its number first."""
    if any(get_origin(arg) is Literal for arg in args):
        raise BrokenInvariant(f"a choice of words inside a union has no form on the wire: {args}")
    forms = [_form(arg) if arg is not type(None) else _NOTHING for arg in args]
    classes = [get_origin(arg) or arg for arg in args]

    def write(out: bytearray, value: Any) -> None:
        number = next((n for n, kind in enumerate(classes) if isinstance(value, kind)), None)
        if number is None:
            raise TypeError(f"{value!r} is none of {classes}")
        out += _BYTE.pack(number)
        forms[number].write(out, value)

    def read(cursor: _Cursor) -> Any:
        (number,) = cursor.take(1)
        if number >= len(forms):
            raise ValueError(f"there are {len(forms)} types, not {number + 1}")
        return forms[number].read(cursor)

    return _Form(write, read, 1)


def _array(dtype: np.dtype[Any]) -> _Form:
    stored = dtype.newbyteorder("<")

    def write(out: bytearray, value: Any) -> None:
        array = np.ascontiguousarray(value, stored)
        out += _BYTE.pack(array.ndim) + struct.pack(f"<{array.ndim}I", *array.shape) + array.tobytes()

    def read(cursor: _Cursor) -> Any:
        (dims,) = cursor.take(1)
        if dims > _MAX_DIMS:
            raise ValueError(f"an array of {dims} dimensions")
        shape = struct.unpack(f"<{dims}I", cursor.take(4 * dims))
        count = 1
        for size in shape:
            count *= size
        return np.frombuffer(cursor.take(count * stored.itemsize), stored).astype(dtype).reshape(shape)

    return _Form(write, read, 1)


def _record(kind: type) -> _Form:
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    forms = [_form(hints[name]) for name in names]

    def write(out: bytearray, value: Any) -> None:
        for name, form in zip(names, forms, strict=True):
            form.write(out, getattr(value, name))

    def read(cursor: _Cursor) -> Any:
        values = [form.read(cursor) for form in forms]
        try:
            return kind(*values)
        except OutriderError as error:  # classes check their own fields
            raise WireError(f"a {kind.__name__} cannot be: {error}") from error

    return _Form(write, read, sum(form.least for form in forms))


_NOTHING = _Form(lambda *_: None, lambda *_: None, 0)
_INTS = _ints()
_PLAIN: Mapping[Any, _Form] = {
    int: _packed(_INT, int),
    float: _packed(_FLOAT, float),
    bool: _packed(_BYTE, _bool),
    str: _text(),
}
