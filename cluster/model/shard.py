"""Which part of a model one rank of a tensor-parallel group holds, and which bytes of the files that is.

Knows: how heads, columns and the vocabulary are dealt to ranks, evenly or not; what the styles of a
model's own `tp_plan` in transformers mean for its weights.
Refuses to know: groups, collectives, and how a part is computed (shard_modules.py).

    heads        whole groups of query heads with their one key/value head: 9 over 3 -> 6/2 and 3/1.
                 More ranks than key/value heads: each is held by several ranks, which split its queries.
    columns      of a feed forward or of every expert, in runs of 32 where they divide by it.
    vocabulary   rows of the embedding and of the head.

A projection to heads or columns is cut by its outputs, the projection back by its inputs; the sums
of the latter over the ranks are the layer's result. A rank reads its cuts and whatever is not cut.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from cluster.errors import ModelUnsupported
from cluster.model.files import StoredTensor

_UNIT = 32  # columns of a group that share a scale in quantized weights, and of a kernel's panel

_OUT, _IN = -2, -1  # dimensions of a weight, counted from its end: experts are stacked in front

#: Styles of `tp_plan` -> the dimension cut; None where every rank holds the whole. Ours where it differs from
#: transformers': fused projections and those under a norm over all heads are cut too, not replicated.
_STYLES: Mapping[str, int | None] = MappingProxyType(
    {
        "colwise": _OUT,
        "colwise_gather_output": _OUT,
        "packed_colwise": _OUT,
        "embedding_rowwise": _OUT,
        "rowwise": _IN,
        "rowwise_split_input": _IN,
        "replicated_with_grad_allreduce": None,
    }
)
#: Styles of a projection back to the hidden width.
BACK = frozenset(style for style, dimension in _STYLES.items() if dimension == _IN)
#: The style of a module of experts: what it returns is this rank's part of a sum.
EXPERTS = "moe_tp_experts"

_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_VOCABULARY = ("lm_head", "model.embed_tokens")
#: Modules of attention that may normalise all heads together; plans leave them out.
HEAD_NORMS = ("q_norm", "k_norm")
_ADVICE = "set target.tensor_parallel to 1"


def deal(total: int, size: int, unit: int = 1) -> list[range]:
    """`total` things as one run a rank, the first ranks getting more; in whole units where that gives each some."""
    if total % unit or total // unit < size:
        unit = 1
    base, extra = divmod(total // unit, size)
    ends = [unit * (base * rank + min(rank, extra)) for rank in range(size + 1)]
    return [range(ends[rank], ends[rank + 1]) for rank in range(size)]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one rank of `size`: its heads, each key/value head of which `copies` ranks hold."""

    rank: int
    size: int
    queries: range
    keys: range
    copies: int = 1

    @staticmethod
    def of(config: PretrainedConfig, rank: int, size: int, name: str) -> Share:
        """Raises ModelUnsupported when something cannot be divided by so many ranks, with the numbers."""
        queries = config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or queries
        widths = {word: getattr(config, word, None) or size for word in _WIDTHS}
        for word, number in {"num_attention_heads": queries, "vocab_size": config.vocab_size, **widths}.items():
            if number < size:
                raise ModelUnsupported(
                    f"{name}: {word}={number} cannot be divided among {size} ranks: "
                    f"set target.tensor_parallel to at most {number}"
                )
        group = queries // keys
        if size <= keys:
            held = deal(keys, size)[rank]
            return Share(rank, size, range(held.start * group, held.stop * group), held)
        holders = deal(size, keys)
        key = next(index for index, ranks in enumerate(holders) if rank in ranks)
        part = deal(group, len(holders[key]))[rank - holders[key].start]
        split = range(key * group + part.start, key * group + part.stop)
        return Share(rank, size, split, range(key, key + 1), len(holders[key]))

    def of_columns(self, total: int) -> range:
        """This rank's of the columns of a feed forward, or of the vocabulary."""
        return deal(total, self.size, _UNIT)[self.rank]

    def widths(self, total: int) -> list[int]:
        """How many of them each rank has."""
        return [len(columns) for columns in deal(total, self.size, _UNIT)]


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs of one dimension, counted from the end, of a stored tensor."""

    dimension: int
    runs: tuple[range, ...]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        cut = list(shape)
        cut[self.dimension] = sum(len(run) for run in self.runs)
        return tuple(cut)

    def read(self, stored: Any) -> torch.Tensor:
        """The runs of a safetensors slice, one behind the other; nothing else is read."""
        before = (slice(None),) * (len(stored.get_shape()) + self.dimension)
        parts = [stored[(*before, slice(run.start, run.stop))] for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dimension)


@dataclass(frozen=True, slots=True)
class Portion:
    """One rank's part of one model.

    whole: the model's configuration.
    config: the same architecture with as many heads, columns and words as this rank has.
    styles: of the model's modules, by path with `*` for layer numbers.
    cuts: by the tensors' names; what is not named is held whole.
    """

    share: Share
    whole: PretrainedConfig
    config: PretrainedConfig
    styles: Mapping[str, str]
    cuts: Mapping[str, Cut]

    def style(self, path: str) -> str | None:
        return self.styles.get(starred(path))

    def held(self, stored: StoredTensor, name: str) -> StoredTensor:
        """What of a stored tensor is read, as if it were stored so."""
        cut = self.cuts.get(name)
        return stored if cut is None else replace(stored, shape=cut.shape(stored.shape))


def portion_of(module: Any, tensors: Mapping[str, StoredTensor], share: Share, name: str) -> Portion:
    """The part of `share`, for a whole module (of any device) and its stored tensors by their names.

    Raises ModelUnsupported when the model has no plan for tensor parallelism that covers attention
    and feed forward, or one with a style that is not known here.
    """
    styles: dict[str, str] = dict(module.tp_plan or {})
    unknown = sorted({style for style in styles.values() if style not in _STYLES and style != EXPERTS})
    if unknown:
        raise ModelUnsupported(f"{name}: tensor parallelism of style {', '.join(unknown)} is not implemented")
    inputs = [path for path, style in styles.items() if _STYLES.get(style) == _IN]
    if not any(".self_attn." in path for path in inputs) or not any(".self_attn." not in path for path in inputs):
        raise ModelUnsupported(
            f"{name} (model_type {module.config.model_type}): its tensor-parallel plan leaves out attention or feed "
            "forward: set target.tensor_parallel to 1"
        )
    cutter = _Cutter(module, styles, share, name)
    return Portion(share, module.config, _narrowed(module.config, share, styles), styles, cutter.cuts(tensors))


def starred(path: str) -> str:
    """A module's path with its numbers replaced, as plans write it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def head_dim_of(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _narrowed(config: PretrainedConfig, share: Share, styles: Mapping[str, str]) -> PretrainedConfig:
    narrow = copy.deepcopy(config)
    narrow.head_dim = head_dim_of(config)
    narrow.num_attention_heads, narrow.num_key_value_heads = len(share.queries), len(share.keys)
    narrow.vocab_size = len(share.of_columns(config.vocab_size))
    narrow.pad_token_id = None  # it names a row that may be another rank's
    shared = any("shared_expert" in path for path in styles)
    for word in _WIDTHS:
        if getattr(config, word, None) and (shared or not word.startswith("shared")):
            setattr(narrow, word, len(share.of_columns(getattr(config, word))))
    return narrow


class _Cutter:
    """Finds the cut of every stored tensor of one model."""

    def __init__(self, module: Any, styles: Mapping[str, str], share: Share, name: str) -> None:
        self._styles = styles
        self._share = share
        self._name = name
        config = module.config
        self._dim = head_dim_of(config)
        self._queries = config.num_attention_heads
        self._keys = getattr(config, "num_key_value_heads", None) or self._queries
        self._prefix, self._parameters = module.base_model_prefix, module.state_dict()
        # Files of a mixture may hold expert by expert what the module stacks; transformers knows their names.
        transforms = get_model_conversion_mapping(module)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]

    def cuts(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Cut]:
        paths = {name: self._path(name) for name in tensors}
        # The columns of a feed forward are the inputs of its projection back.
        widths = {
            _parent(paths[name]): stored.shape[_IN]
            for name, stored in tensors.items()
            if self._dimension(paths[name]) == _IN and len(stored.shape) > 1
        }
        found: dict[str, Cut] = {}
        for name, stored in tensors.items():
            cut = self._cut(paths[name], stored.shape, widths)
            if cut is not None:
                found[name] = cut
        return found

    def _path(self, name: str) -> str:
        """The module (or stacked parameter) a stored tensor belongs to."""
        renamed, _ = rename_source_key(name, self._renamings, self._converters, self._prefix, self._parameters)
        return re.sub(r"\.(weight|bias)$", "", renamed)

    def _dimension(self, path: str) -> int | None:
        return _STYLES.get(self._styles.get(starred(path), ""))

    def _cut(self, path: str, shape: tuple[int, ...], widths: Mapping[str, int]) -> Cut | None:
        child = path.rpartition(".")[2]
        if _parent(path).endswith(".self_attn") and child in HEAD_NORMS:
            return self._norm_cut(child, shape)
        dimension = self._dimension(path)
        if dimension is None or (dimension == _IN and len(shape) == 1):  # such a bias is added once, to the sum
            return None
        dimension = max(dimension, -len(shape))
        length = shape[dimension]
        if path in _VOCABULARY:
            return Cut(dimension, (self._share.of_columns(length),))
        if _parent(path).endswith(".self_attn"):
            return Cut(dimension, self._head_runs(path, length))
        width = widths.get(_parent(path), 0)
        if width == 0 or length % width or length > 2 * width:
            raise ModelUnsupported(f"{self._name}: {path} has {length} columns, not once or twice {width}: {_ADVICE}")
        mine = self._share.of_columns(width)
        return Cut(dimension, tuple(range(at + mine.start, at + mine.stop) for at in range(0, length, width)))

    def _norm_cut(self, child: str, shape: tuple[int, ...]) -> Cut | None:
        """A norm over all heads together is cut by heads; one over a single head is every head's."""
        heads, mine = self._heads(child)
        if shape != (heads * self._dim,) or heads == 1:
            return None
        return Cut(-1, (range(mine.start * self._dim, mine.stop * self._dim),))

    def _head_runs(self, path: str, length: int) -> tuple[range, ...]:
        """The runs of this rank's heads in one projection, of queries, keys, values or of all three."""
        child = path.rpartition(".")[2]
        kinds = ("q", "k", "v") if child == "qkv_proj" else (child,)
        runs, at = [], 0
        for kind in kinds:
            heads, mine = self._heads(kind)
            runs.append(range(at + mine.start * self._dim, at + mine.stop * self._dim))
            at += heads * self._dim
        if at != length:
            raise ModelUnsupported(f"{self._name}: {path} has {length} columns, its heads make {at}: {_ADVICE}")
        return tuple(runs)

    def _heads(self, kind: str) -> tuple[int, range]:
        """How many heads a projection of that name has, and which of them are this rank's."""
        if kind[:1] in ("k", "v"):
            return self._keys, self._share.keys
        return self._queries, self._share.queries


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
