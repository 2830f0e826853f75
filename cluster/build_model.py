"""From a configuration to a model that computes: whole, or one rank's part of it.

Knows: how memory is divided into blocks of keys and values, and that every rank of a target has as
many blocks as the poorest of them can hold.
Refuses to know: engines, proposers, who starts the processes of the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cluster.config import EngineConfig
from cluster.errors import CapacityError, ConfigError
from cluster.kernels.library import open_library
from cluster.kv.blocks import BlockPool
from cluster.kv.cache import KVCache
from cluster.kv.keys import KeyContext
from cluster.model.device import available_memory, resolve_device, resolve_dtype
from cluster.model.files import ModelFiles
from cluster.model.info import ModelInfo
from cluster.model.load import LoadedModel, load_model, locate, read_config
from cluster.model.quantize import Bits, quantize_linears
from cluster.model.runner import Runner
from cluster.model.sharded_runner import Part, ShardedRunner, follow
from cluster.model.torch_runner import TorchRunner, arena_for, block_bytes
from cluster.parallel.collectives import all_reduce
from cluster.parallel.groups import Endpoint, Group, join

#: Longest a rank may take to start and to load its part, and longest it may take to do its part of a step, in seconds.
READY_S = 900.0
STEP_S = 30.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one target meet: `endpoint` of a Rendezvous (parallel/groups.py) that its owner keeps open.

    watch: called every few milliseconds while ranks are missing; raises when one of them will not
    come, so that nobody waits for the deadline.
    ready_s, step_s: deadlines of starting and loading, and of a step; a peer that dies is noticed at
    once, these are for one that freezes.
    """

    endpoint: Endpoint
    watch: Callable[[], None] | None = None
    ready_s: float = READY_S
    step_s: float = STEP_S


@dataclass(frozen=True, slots=True)
class Model:
    """A model on its device with a cache of its own. `close` ends what runs beside it in other processes."""

    runner: Runner
    cache: KVCache
    info: ModelInfo
    max_context: int
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a rank other than 0, loaded and met with the others."""

    part: Part

    def follow(self) -> None:
        """Compute what rank 0 says until it closes its engine; the process is of no use afterwards.

        Raises PeerLost when rank 0 or another rank is gone: within milliseconds of a death.
        """
        follow(self.part)


def assemble_shard(config: EngineConfig, meeting: Meeting, rank: int) -> Shard:
    """Load rank `rank` (1 to `target.tensor_parallel` - 1) of the target; returns when all ranks are ready.

    The configuration must be rank 0's. Sets torch's thread count for this process.
    Raises ConfigError, ModelError and its kinds, CapacityError, PeerLost.
    """
    use_threads(config)
    files = locate(config.target.model)
    if resolve_device(config.target.device).type == "cpu":
        open_library()
    part, _ = _load_part(config, files, meeting, rank)
    return Shard(part)


def use_threads(config: EngineConfig) -> int:
    """Set torch's thread count for this process as configured, or to its cores; returns it."""
    threads = config.target.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def load_target(config: EngineConfig, files: ModelFiles, meeting: Meeting | None) -> Model:
    """The target; with a meeting, rank 0 of it."""
    if meeting is None:
        model = load(config, files, config.target.dtype, bits=config.target.bits)
        _check_deterministic(config, model)
        return model
    part, (info, max_context, blocks) = _load_part(config, files, meeting, 0)
    runner = ShardedRunner(part)
    return Model(runner, _cache(config, info, blocks), info, max_context, runner.close)


def _check_deterministic(config: EngineConfig, model: Model) -> None:
    kept = isinstance(model.runner, TorchRunner) and model.runner.row_invariant
    if config.target.deterministic and not kept:
        raise ConfigError(
            f"target.deterministic: {model.info.name} ({model.info.architecture}) on {model.info.device} is not run by "
            "kernels that keep it: it takes a CPU, a C++ compiler and a model of the llama, mistral, qwen2 or qwen3 "
            "family; leave it out, or choose such a model"
        )


def load(
    config: EngineConfig,
    files: ModelFiles,
    dtype_name: str,
    *,
    layers: tuple[int, ...] | None = None,
    blocks: int | None = None,
    bits: Bits | None = None,
) -> Model:
    """One model with an arena of `blocks` blocks, or of what the configuration and memory allow."""
    loaded = _read(config, files, dtype_name, layers=layers, bits=bits)
    info, max_context = loaded.info, _max_context(config, loaded.info)
    if blocks is None:
        blocks = _plan_blocks(config, info, max_context)
    arena = arena_for(info, blocks, block_tokens=config.cache.block_tokens)
    return Model(TorchRunner(loaded, arena), _cache(config, info, blocks), info, max_context, _nothing)


def _load_part(
    config: EngineConfig, files: ModelFiles, meeting: Meeting, rank: int
) -> tuple[Part, tuple[ModelInfo, int, int]]:
    """One rank's part of the target; with it the part's facts, the longest context and the number of blocks."""
    target = config.target
    group = join(
        meeting.endpoint,
        rank,
        target.tensor_parallel,
        name="target",
        timeout_s=meeting.step_s,
        meet_s=meeting.ready_s,
        device=resolve_device(target.device),
        watch=meeting.watch,
    )
    loaded = _read(config, files, target.dtype, bits=target.bits, rank=rank, ranks=group.size)
    info, max_context = loaded.info, _max_context(config, loaded.info)
    blocks = _least(group, _plan_blocks(config, info, max_context), meeting.ready_s)
    arena = arena_for(info, blocks, block_tokens=config.cache.block_tokens)
    return Part(loaded, arena, group, ready_s=meeting.ready_s), (info, max_context, blocks)


def _least(group: Group, number: int, deadline_s: float) -> int:
    """The least of the ranks' numbers, at every rank."""
    numbers = torch.zeros(group.size, dtype=torch.int64)
    numbers[group.rank] = number
    return int(all_reduce(group, numbers, deadline_s).min())


def _read(
    config: EngineConfig,
    files: ModelFiles,
    dtype_name: str,
    *,
    layers: tuple[int, ...] | None = None,
    bits: Bits | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> LoadedModel:
    device = resolve_device(config.target.device)
    dtype = resolve_dtype(dtype_name, device, read_config(files).dtype)
    loaded = load_model(files, dtype=dtype, device=device, layers=layers, rank=rank, ranks=ranks)
    if bits is None:
        return loaded
    quantize_linears(loaded.module, bits)
    return replace(loaded, info=replace(loaded.info, fingerprint=f"{loaded.info.fingerprint}/{bits} bits"))


def _max_context(config: EngineConfig, info: ModelInfo) -> int:
    return min(info.max_context, config.target.max_context or info.max_context)


def _cache(config: EngineConfig, info: ModelInfo, blocks: int) -> KVCache:
    block_tokens = config.cache.block_tokens
    context = KeyContext(model=info.fingerprint, layout=f"{info.dtype}/{block_tokens}")
    return KVCache(BlockPool(blocks), block_tokens, context, prefix=config.cache.prefix)


def _nothing() -> None:
    """What ends with the process needs no closing."""


def _plan_blocks(config: EngineConfig, info: ModelInfo, max_context: int) -> int:
    """How many blocks: as configured, or a quarter of the free memory, never more than could be used."""
    cache = config.cache
    size = block_bytes(info, block_tokens=cache.block_tokens)
    device = torch.device(info.device)
    free = available_memory(device)
    if cache.blocks is not None:
        blocks = cache.blocks
    elif cache.memory_bytes is not None:
        blocks = cache.memory_bytes // size
    else:
        useful = -(-max_context // cache.block_tokens) * config.scheduler.max_sequences
        sharers = config.target.tensor_parallel if device.type == "cpu" else 1  # they may be on one machine
        blocks = min(useful, free // (4 * sharers) // size)
    if blocks < 2:
        raise CapacityError(f"cache.memory gives {blocks} blocks of {size} bytes; at least 2 are needed: raise it")
    if blocks * size > free:
        raise CapacityError(
            f"the cache needs {blocks * size} bytes ({blocks} blocks of {size}), {free} are free on {info.device}: "
            "lower cache.memory or cache.blocks"
        )
    return blocks
