"""Fixtures shared by all tests: real models, tiny and small, on disk.

Imports nothing heavy itself, so that tests which need no model start at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Before anything imports the libraries that read them. No test may reach for the network; and the
# models are so small that more threads than this only wait for each other.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, os.cpu_count() or 1)))

if TYPE_CHECKING:
    from cluster.model.files import ModelFiles


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny random model of a family, made once a session. Read only."""
    from tests.tiny import make_tiny

    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny(tmp_path_factory.mktemp(f"tiny-{family}"), family)
        return made[family]

    return directory


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: Callable[[str], Path]) -> Path:
    """Directory of a tiny random Llama with tokenizer and chat template. Read only."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """The real SmolLM2-135M-Instruct, from the user's cache; converted first if need be."""
    from cluster.model.load import locate

    return locate("smollm2-135m")
