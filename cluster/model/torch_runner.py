"""The runner that computes plans with a torch model over a paged arena.

Knows: how to turn a plan into one forward pass and pick the positions that want logits.
Refuses to know: sampling, acceptance, scheduling; which linears and kernels the model is made of
(surgery.py) and how attention is computed (attention/).

Legend of shape suffixes: T tokens of the step, N positions that want logits, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import BrokenInvariant, ModelUnsupported
from cluster.kernels.library import Library, open_library
from cluster.kv.store import DEFAULT_BLOCK_TOKENS, Arena
from cluster.messages import Plan
from cluster.model.attention import Backend, PlainBackend, Ragged
from cluster.model.attention.bridge import IMPLEMENTATION, PagedCache, register
from cluster.model.attention.cpu import CpuBackend
from cluster.model.fused import FusedDecoder
from cluster.model.info import ModelInfo
from cluster.model.load import LoadedModel
from cluster.model.pattern import follows_pattern
from cluster.model.runner import Flight
from cluster.model.surgery import pack_linears


class TorchRunner:
    """Runner (runner.py) over one loaded model and one arena on the same device.

    Takes the module over: its weights are packed, so it cannot be used for anything else after.
    kernels: False keeps every computation in plain torch, the truth the kernels are tested against.

    Raises ModelUnsupported when model and arena do not fit each other.
    """

    def __init__(self, loaded: LoadedModel, arena: Arena, *, kernels: bool = True) -> None:
        self._info = loaded.info
        self._arena = arena
        self._module: Any = loaded.module
        wanted = (self._info.num_layers, self._info.num_kv_heads, self._info.head_dim)
        given = (arena.num_layers, arena.num_kv_heads, arena.head_dim)
        if wanted != given:
            raise ModelUnsupported(f"{self._info.name}: (layers, kv heads, head dim) are {wanted}, the arena's {given}")
        register()
        self._module.eval()
        self._module.set_attn_implementation(IMPLEMENTATION)
        self._backend: Backend = PlainBackend()
        self._fused: FusedDecoder | None = None
        if kernels and Library.supports(arena.dtype, arena.device):
            self._use_kernels()

    def _use_kernels(self) -> None:
        library = open_library()
        if library is None:
            return
        self._backend = CpuBackend(library)
        if follows_pattern(self._module):
            self._fused = FusedDecoder(self._module, library)
        else:
            pack_linears(self._module, library)

    @property
    def vocab_size(self) -> int:
        return self._info.vocab_size

    @property
    def row_invariant(self) -> bool:
        """Whether a chain's logits are the same bits whatever is computed beside it: the fused kernels see to it."""
        return self._fused is not None

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """Compute a plan; see runner.py.

        Raises BrokenInvariant on a token id outside the vocabulary, a block that does not exist
        or a row that wants more logits than it has tokens.
        """
        if plan.moves:
            self._arena.move(plan.moves)
        if not plan.rows:
            return Flight(plan, torch.empty(0, self.vocab_size))
        ragged, tokens_T, wanted_N = self.layout(plan)
        if self._fused is not None:
            return Flight(plan, self._fused.run(self._arena, tokens_T, ragged, wanted_N))
        device = self._arena.device
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(tokens_T).to(device)[None],
            "position_ids": torch.from_numpy(ragged.positions_T).to(device)[None],
            "cache": PagedCache(self._arena, self._backend, ragged),
            "use_cache": False,
        }
        if len(wanted_N) == 0:
            self._module.base_model(**inputs)
            return Flight(plan, torch.empty(0, self.vocab_size, device=device))
        output = self._module(**inputs, logits_to_keep=torch.from_numpy(wanted_N).to(device))
        return Flight(plan, output.logits[0].float())

    def layout(self, plan: Plan) -> tuple[Ragged, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where everything of a plan sits, its token ids [T] and the positions that want logits [N], all checked."""
        ragged = Ragged.of(plan.rows, block_tokens=self._arena.block_tokens, num_blocks=self._arena.num_blocks)
        return ragged, self._tokens(plan), wanted_positions(plan)

    def _tokens(self, plan: Plan) -> npt.NDArray[np.int64]:
        tokens_T = np.fromiter((token for row in plan.rows for token in row.tokens), np.int64, plan.num_tokens)
        if tokens_T.min() < 0 or tokens_T.max() >= self.vocab_size:
            raise BrokenInvariant(f"a planned token id lies outside 0..{self.vocab_size - 1}")
        return tokens_T


def wanted_positions(plan: Plan) -> npt.NDArray[np.int64]:
    """Indices into the flat step of the tokens that want logits: the last `wants` of each row, int64 [N]."""
    wanted: list[int] = []
    end = 0
    for row in plan.rows:
        end += len(row.tokens)
        if not 0 <= row.wants <= len(row.tokens):
            raise BrokenInvariant(f"sequence {row.sequence}: {row.wants} logits wanted of {len(row.tokens)} tokens")
        wanted.extend(range(end - row.wants, end))
    return np.asarray(wanted, np.int64)


def arena_for(info: ModelInfo, num_blocks: int, *, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> Arena:
    """An arena that fits a model, in its dtype and on its device."""
    return Arena(
        num_blocks,
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        dtype=storage_dtype(info),
        device=info.device,
        block_tokens=block_tokens,
    )


def block_bytes(info: ModelInfo, *, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> int:
    """Bytes one block of `arena_for` takes: memory divided by it is the number of blocks."""
    return Arena.bytes_per_block(
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        dtype=storage_dtype(info),
        block_tokens=block_tokens,
    )


def storage_dtype(info: ModelInfo) -> torch.dtype:
    """The torch dtype named by `info.dtype` ("bfloat16" or "torch.bfloat16")."""
    dtype = getattr(torch, info.dtype.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
