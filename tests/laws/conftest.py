"""The laws keep hundreds of thousands of small values alive at once; walking them again and again helps nobody."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _without_cycle_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
    gc.collect()
