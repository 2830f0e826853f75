"""Logits processors by import path, found once at start.

Knows: what "module:attribute" means and what to say when nothing callable is there.
Refuses to know: what a processor does, and who asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import reduce

from cluster.errors import ConfigError
from cluster.model.processors import LogitsProcessor


def load_processors(paths: Mapping[str, str]) -> dict[str, LogitsProcessor]:
    """Processors by name from import paths by name. Raises ConfigError naming the key that is wrong."""
    return {name: _load(f"processors.{name}", path) for name, path in paths.items()}


def _load(key: str, path: str) -> LogitsProcessor:
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(
            f"{key}: {path!r} is no import path: write module:attribute, such as my_package.rules:no_digits"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of someone else's may fail in any way while it is imported
        raise ConfigError(f"{key}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    try:
        found: object = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise ConfigError(f"{key}: module {module_name!r} has no attribute {attribute!r}") from None
    if not callable(found):
        raise ConfigError(f"{key}: {path!r} is a {type(found).__name__}, not something to call with (tokens, logits)")
    return found
