"""From a configuration to an engine: the one place that knows which part goes with which.

Knows: every constructor, and how values left to "auto" are resolved on this machine.
Refuses to know: the step, Ray, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.build_drafts import Progress, Site, open_drafts, silent
from cluster.build_drafts import assemble_drafter as assemble_drafter
from cluster.build_model import Meeting as Meeting
from cluster.build_model import Model, load_target, use_threads
from cluster.build_model import Shard as Shard
from cluster.build_model import assemble_shard as assemble_shard
from cluster.config import EngineConfig, SchedulerConfig
from cluster.config_drafts import SuffixDraft
from cluster.control.length import LengthControl
from cluster.control.steptime import StepTimes, measure
from cluster.draft.blend import ExpectedOffer
from cluster.draft.first import FirstOffer
from cluster.draft.model import ModelProposer
from cluster.draft.paced import Paced
from cluster.draft.proposer import Combiner, Proposer
from cluster.draft.remote import RemoteProposer
from cluster.draft.seq2seq import Seq2SeqProposer
from cluster.draft.suffix.native import TrieMaker
from cluster.draft.translate import TranslatedProposer
from cluster.engine import Engine, Parts
from cluster.errors import ConfigError
from cluster.kernels.library import open_library
from cluster.model.device import resolve_device
from cluster.model.files import ModelFiles
from cluster.model.info import ModelInfo
from cluster.model.load import locate
from cluster.model.processors import LogitsProcessor
from cluster.model.quantize import Bits
from cluster.model.runner import Runner
from cluster.model.torch_runner import block_bytes
from cluster.sched.policy import ByPriority, Fair, Fcfs, Policy
from cluster.sched.scheduler import Limits, Scheduler
from cluster.text.tokenizer import Tokenizer
from cluster.verify.judge import Judge
from cluster.verify.plugged import load_processors

#: The target among an assembly's runners.
TARGET = "target"

#: Orders by the name they have in scheduler.policy.
_POLICIES: Mapping[str, Callable[[], Policy]] = {"fcfs": Fcfs, "priority": ByPriority}

#: Proposers that draft pass by pass beside the models with a runner, which are timed at start.
_BY_PASS = (Seq2SeqProposer, TranslatedProposer)
#: Blocks of a draft model's cache that its passes are timed in, and when to stop.
_PASS_BLOCKS, _PASS_PATIENCE_S = 2, 0.5


@dataclass(frozen=True, slots=True)
class Resolved:
    """What "auto" became on this machine; printed at start."""

    model: ModelInfo
    threads: int
    max_context: int
    blocks: int
    cache_bytes: int
    drafts: tuple[str, ...]
    bits: Bits | None = None  # None: weights are whole
    ranks: int = 1

    def lines(self) -> list[str]:
        """One fact a line, for people."""
        model = self.model
        divided = f", divided among {self.ranks} processes" if self.ranks > 1 else ""
        return [
            f"model      {model.name} ({model.architecture}, {model.num_layers} layers){divided}",
            f"dtype      {model.dtype} on {model.device}" + (f", weights in {self.bits} bits" if self.bits else ""),
            f"context    {self.max_context} tokens",
            f"cache      {self.blocks} blocks, {self.cache_bytes / 2**20:.0f} MiB",
            f"drafts     {', '.join(self.drafts) or 'none'}",
            f"threads    {self.threads}",
        ]


@dataclass(frozen=True, slots=True)
class Assembly:
    """A working engine and what its callers need beside it.

    runners: the target's under TARGET and those of draft models in this process under their names, for timing steps
    before anything is asked of the engine.
    remote: by position in `drafts`, those whose drafters the caller attaches; without any, they offer nothing.
    """

    engine: Engine
    tokenizer: Tokenizer
    resolved: Resolved
    runners: Mapping[str, Runner]
    remote: Mapping[int, RemoteProposer] = field(default_factory=dict)


def assemble(config: EngineConfig, progress: Progress = silent, meeting: Meeting | None = None) -> Assembly:
    """Load the models and put an engine together. Sets torch's thread count for this process.

    meeting: where the ranks of a target with `tensor_parallel` above 1 meet; this process is rank 0,
    and each of the others calls `assemble_shard` and then `follow`. `Engine.close` sends them home.
    Raises ConfigError, ModelError and its kinds, CapacityError, PeerLost.
    """
    ranks = config.target.tensor_parallel
    if (ranks > 1) != (meeting is not None):
        raise ConfigError(f"target.tensor_parallel={ranks}: the ranks of one engine need a place to meet, and one none")
    threads = use_threads(config)
    plugged = load_processors(config.processors)  # first: it costs nothing, and what it finds wrong is a typing slip
    files = locate(config.target.model, progress)
    tokenizer = _tokenizer(config, files)
    _compile(config, progress)
    progress(f"loading {files.name}")
    target = load_target(config, files, meeting)
    tokenizer.check(target.info.vocab_size)
    blocks = target.cache.counts.total
    site = Site(config, tokenizer, target.info.vocab_size, target.info.dtype, blocks, progress)
    proposers, remote = open_drafts(site)
    resolved = Resolved(
        model=target.info,
        threads=threads,
        max_context=target.max_context,
        blocks=blocks,
        cache_bytes=blocks * block_bytes(target.info, block_tokens=config.cache.block_tokens),
        drafts=tuple(proposer.name for proposer in proposers),
        bits=config.target.bits,
        ranks=ranks,
    )
    runners = {proposer.name: proposer.runner for proposer in proposers if isinstance(proposer, ModelProposer)}
    engine = _engine(config, target, proposers, tokenizer, plugged)
    return Assembly(engine, tokenizer, resolved, {TARGET: target.runner, **runners}, remote)


def open_tokenizer(config: EngineConfig, progress: Progress = silent) -> Tokenizer:
    """The tokenizer alone, for a process that holds no model. Raises as `assemble` does."""
    return _tokenizer(config, locate(config.target.model, progress))


def _compile(config: EngineConfig, progress: Progress) -> None:
    """Build the libraries this configuration uses now, where the wait can be explained."""

    def announce() -> None:
        progress("compiling kernels")

    if resolve_device(config.target.device).type == "cpu":
        open_library(announce)
    if any(isinstance(draft, SuffixDraft) for draft in config.drafts):
        TrieMaker(announce)


def _tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer:
    other = config.target.tokenizer
    return Tokenizer.load(files.directory if other is None else locate(other).directory)


def _engine(
    config: EngineConfig,
    target: Model,
    proposers: list[Proposer],
    tokenizer: Tokenizer,
    plugged: Mapping[str, LogitsProcessor],
) -> Engine:
    times, proposers = _timed(config, target, proposers)
    # A tree's nodes lie in other slots than their tokens will, so attention sums them in another order.
    trees = not config.target.deterministic
    limits = Limits(config.scheduler.max_sequences, config.scheduler.max_waiting, trees)
    return Engine(
        Parts(
            runner=target.runner,
            cache=target.cache,
            scheduler=Scheduler(target.cache, limits, _policy(config.scheduler)),
            judge=Judge(target.info.vocab_size, tokenizer.eos_ids, tokenizer.stream, plugged, tokenizer.lexicon),
            proposer=_combine(config, proposers, times),
            control=LengthControl(config.knobs.knobs(), times, [p for p in proposers if isinstance(p, Paced)]),
            max_context=target.max_context,
            close=target.close,
        )
    )


def _timed(config: EngineConfig, target: Model, proposers: list[Proposer]) -> tuple[StepTimes | None, list[Proposer]]:
    """How long the target's steps take, and the proposers, those that draft pass by pass with their times.

    An engine without drafts has nothing to weigh, and measures nothing.
    """
    if not proposers:
        return None, []
    size = config.cache.block_tokens
    table = measure(target.runner, blocks=target.cache.counts.total, block_tokens=size)
    return StepTimes(table), [_paced(proposer, size) for proposer in proposers]


def _paced(proposer: Proposer, block_tokens: int) -> Proposer:
    if isinstance(proposer, ModelProposer):
        passes = measure(proposer.runner, blocks=_PASS_BLOCKS, block_tokens=block_tokens, patience_s=_PASS_PATIENCE_S)
        return Paced(proposer, passes.at)
    return Paced(proposer) if isinstance(proposer, _BY_PASS) else proposer


def _combine(config: EngineConfig, proposers: list[Proposer], times: StepTimes | None) -> Combiner:
    if config.blend == "expected" and times is not None:
        return ExpectedOffer(proposers, times.at)
    return FirstOffer(proposers)


def _policy(config: SchedulerConfig) -> Policy:
    policy = _POLICIES[config.policy]()
    return Fair(policy) if config.fair else policy
