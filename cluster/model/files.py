"""A model's files on disk: which must be there, whether they are whole, and what they hold.

Knows: the layout of a safetensors directory (config.json, *.safetensors, an index when sharded),
the safetensors header, and our manifest of checksums.
Refuses to know: torch, transformers, and how a model is built from its weights.

A manifest (`outrider-manifest.json`) lists size and sha256 of each file. Reading half a gigabyte
at every start would be wasteful, so it also keeps a stamp (modification and change time) taken
when the checksums were last verified: while stamp and size hold, the checksums are trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ModelCorrupt, ModelNotFound

MANIFEST = "outrider-manifest.json"
_INDEX = "model.safetensors.index.json"
_ITEM_BYTES: Mapping[str, float] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1, "F4": 0.5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies. `name` is what it is called in messages and in the API."""

    directory: Path
    name: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a safetensors header. `dtype` is the format's own word, such as "BF16"."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def nbytes(self) -> int:
        return math.ceil(self.numel * _ITEM_BYTES[self.dtype])


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises: ModelNotFound when the file is missing, ModelCorrupt when it is not a JSON object.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ModelNotFound(
            f"{path.parent} holds no {path.name}; a model directory needs config.json and *.safetensors"
        ) from None
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from error
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise ModelCorrupt(f"{path} ({len(raw)} bytes) is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{path} ({len(raw)} bytes) holds a JSON {type(value).__name__}, expected an object")
    return value


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model, in name order; those of the index when there is one.

    Raises: ModelNotFound when there are none, or when one that the index names is missing.
    """
    if (directory / _INDEX).exists():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelCorrupt(f"{directory / _INDEX} has no weight_map")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelNotFound(f"{directory}: {_INDEX} names {', '.join(missing)}, which is not there")
        return tuple(directory / name for name in names)
    found = tuple(sorted(directory.glob("*.safetensors")))
    if not found:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in directory.glob(pattern))
        hint = f" (it holds {', '.join(others[:3])}: convert to safetensors first)" if others else ""
        raise ModelNotFound(f"{directory} holds no *.safetensors{hint}")
    return found


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """Entries of one safetensors file, after checking that the file is as long as its header says.

    Raises: ModelCorrupt, naming the file and the bytes expected and found.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise ModelCorrupt(f"{path} is truncated: expected at least 8 bytes, found {size}")
        length = int.from_bytes(head, "little")
        if length > size - 8:
            raise ModelCorrupt(
                f"{path} is truncated or not safetensors: its header alone needs {8 + length} bytes, found {size}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = tuple(
            StoredTensor(name, path, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()
        )
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelCorrupt(f"{path} ({size} bytes) has a broken safetensors header: {error!r}") from error
    if size != 8 + length + end:
        raise ModelCorrupt(f"{path} has the wrong length: expected {8 + length + end} bytes, found {size}")
    unknown = sorted({t.dtype for t in tensors} - _ITEM_BYTES.keys())
    if unknown:
        raise ModelCorrupt(f"{path} holds tensors of unknown type {', '.join(unknown)}")
    return tensors


def write_manifest(directory: Path, source: Mapping[str, str]) -> None:
    """Record size, sha256 and stamp of every file in `directory`. `source` says where they came from."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_of(path), "stamp": _stamp(path)}
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    _replace_json(directory / MANIFEST, {"format": 1, "source": dict(source), "files": files})


def verify_manifest(directory: Path) -> dict[str, str] | None:
    """sha256 by file name, verified; None when the directory has no manifest.

    Sizes are always compared. A file whose stamp differs is read and its sha256 compared; if it
    holds, the new stamp is kept (where the directory is writable).

    Raises: ModelCorrupt, naming the file and what was expected and found.
    """
    path = directory / MANIFEST
    if not path.exists():
        return None
    manifest = read_json(path)
    try:
        entries = [(n, int(e["size"]), str(e["sha256"]), list(e["stamp"])) for n, e in manifest["files"].items()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelCorrupt(f"{path} is not a manifest: {error!r}") from error
    stale = False
    for name, size, sha256, stamp in entries:
        file = directory / name
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            raise ModelCorrupt(f"{file} is truncated or changed: expected {size} bytes, found {found}")
        if _stamp(file) != stamp:
            actual = sha256_of(file)
            if actual != sha256:
                raise ModelCorrupt(
                    f"{file} ({size} bytes) was changed: expected sha256 {sha256[:16]}..., found {actual[:16]}..."
                )
            manifest["files"][name]["stamp"] = _stamp(file)
            stale = True
    if stale:
        with contextlib.suppress(OSError):  # a read-only copy is verified in full each time
            _replace_json(path, manifest)
    return {name: sha256 for name, _, sha256, _ in entries}


def sha256_of(path: Path) -> str:
    """Hex sha256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_identity(directory: Path, checksums: Mapping[str, str] | None) -> Iterator[bytes]:
    """Bytes that differ when the weights differ; cheap.

    With verified checksums, those. Without, each file's size, header and both ends: enough to tell
    models apart, not to notice a single weight edited in place.
    """
    for path in weight_files(directory):
        if checksums is not None and path.name in checksums:
            yield f"{path.name}:{checksums[path.name]};".encode()
            continue
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            yield f"{path.name}:{size};".encode()
            yield file.read(min(size, length + 65536))
            file.seek(max(0, size - 65536))
            yield file.read()


def _stamp(path: Path) -> list[int]:
    # The change time is beside the modification time because the latter can be set at will.
    stat = path.stat()
    return [stat.st_mtime_ns, stat.st_ctime_ns]


def _replace_json(path: Path, value: object) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(value, indent=1))
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
