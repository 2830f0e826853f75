"""What every part of the configuration is made of: strict models, whole numbers, amounts of memory.

Knows: how a person may write such a value.
Refuses to know: any key of the tree.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Strict

# YAML reads `yes` and `on` as true, which pydantic would otherwise take for the number 1.
Whole = Annotated[int, Strict()]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate("kmgt")}
_UNITS |= {f"{letter}ib": 1024 ** (power + 1) for power, letter in enumerate("kmgt")}


class StrictModel(BaseModel):
    """A part of the tree: no unknown keys, no changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def parse_bytes(text: str) -> int:
    """Bytes in "512MiB", "1.5GB" or "4096". Raises ValueError that lists the units."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise ValueError(
            f"{text!r} is no amount of memory: write a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB, "
            f'such as "512MiB", or "auto"'
        )
    return size


def bare_number(value: object) -> object:
    """YAML reads an unquoted 536870912 as an integer; where memory is meant, it means bytes."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
