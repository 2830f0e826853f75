"""How transformers' modelling code reaches our attention: one registered function, one cache.

Knows: the call convention of `AttentionInterface` and of `cache.update`.
Refuses to know: how attention is computed, and what a plan is.

No mask function is registered under the name, so transformers builds no mask: causality and
windows are the backend's. A keyword it does not know is refused, never ignored: it may change
the law.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from cluster.errors import ModelUnsupported
from cluster.kv.store import Arena
from cluster.model.attention.base import Backend, Ragged, Variant

#: The name under which transformers finds `paged_attention`.
IMPLEMENTATION = "outrider_paged"

#: Keywords that reach every layer and say nothing about the law once pages carry positions.
_HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "output_router_logits", "output_attentions"})


class PagedCache:
    """What `cache=` of a forward receives: takes keys and values where a layer hands them over."""

    def __init__(self, arena: Arena, backend: Backend, ragged: Ragged) -> None:
        self.arena = arena
        self.backend = backend
        self.ragged = ragged

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, H, T, D] keys and values of one layer into the arena.

        `kwargs` is the layer's own keyword dictionary: through it the attention call that follows
        learns of this cache.
        """
        if kwargs is None:
            raise ModelUnsupported("this architecture hands its cache no keywords: paged attention cannot follow it")
        self.backend.write(self.arena, layer_idx, self.ragged, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        kwargs["paged_cache"] = self
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        """Nothing is known to transformers: positions are always given explicitly."""
        return 0


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001 - already in the arena
    value: torch.Tensor,  # noqa: ARG001 - already in the arena
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_cache: PagedCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query [1, Q, T, D] over the arena, [1, T, Q, D], for transformers.

    Raises ModelUnsupported on whatever it would have to ignore.
    """
    unknown = sorted(name for name, value in kwargs.items() if name not in _HARMLESS and value is not None)
    if unknown:
        raise ModelUnsupported(f"{type(module).__name__} asks attention for {', '.join(unknown)}: not implemented")
    if attention_mask is not None or dropout:
        raise ModelUnsupported(f"{type(module).__name__} asks for an attention mask or dropout: not implemented")
    if paged_cache is None:
        raise ModelUnsupported(f"{type(module).__name__} attends without writing to the cache: not implemented")
    variant = Variant(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    out_TQD = paged_cache.backend.attend(
        paged_cache.arena, layer, paged_cache.ragged, query[0].transpose(0, 1), variant
    )
    return out_TQD.unsqueeze(0), None


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers. May be called again."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
