"""Paged attention: one protocol, a plain twin for every device, faster backends beside it."""

from __future__ import annotations

from cluster.model.attention.base import Backend, Ragged, Variant
from cluster.model.attention.plain import PlainBackend

__all__ = ["Backend", "PlainBackend", "Ragged", "Variant"]
