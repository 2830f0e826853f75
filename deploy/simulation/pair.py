"""Reads the acceptance of a real pair, as benchmarks measured it.

Knows: the file: a JSON object whose `acceptance` has, by workload, the chance that a draft token stands given that
those before it did, by position.
Refuses to know: how it was measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from cluster.errors import ConfigError
from cluster.model.emulated import Acceptance


def read_acceptance(path: Path, workload: str | None, miss_power: float = 1.0) -> Acceptance:
    """The acceptance of one workload; None: the mean over all, as far as the shortest reaches. Raises ConfigError."""
    lists = _lists(path)
    if workload is not None and workload not in lists:
        raise ConfigError(f"{path}: no workload {workload!r}; there are {', '.join(lists)}")
    chosen = list(lists.values()) if workload is None else [lists[workload]]
    return Acceptance(tuple(sum(column) / len(column) for column in zip(*chosen, strict=False)), miss_power)


def _lists(path: Path) -> dict[str, list[float]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    lists = document.get("acceptance") if isinstance(document, dict) else None
    if not isinstance(lists, dict) or not lists or not all(_is_law(values) for values in lists.values()):
        raise ConfigError(f'{path}: wants {{"acceptance": {{"workload": [0.8, 0.7, ...], ...}}}}')
    return lists


def _is_law(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, int | float) for value in values)
