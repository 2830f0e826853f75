"""From a configuration to an engine: the one place that knows which part goes with which.

Knows: every constructor, and how values left to "auto" are resolved on this machine.
Refuses to know: the step, Ray, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.build_model import Meeting as Meeting
from cluster.build_model import Model, load, load_target, use_threads
from cluster.build_model import Shard as Shard
from cluster.build_model import assemble_shard as assemble_shard
from cluster.config import EngineConfig, SchedulerConfig
from cluster.config_drafts import (
    DraftConfig,
    DraftingConfig,
    ModelDraft,
    NgramDraft,
    QuantizedDraft,
    RecyclingDraft,
    Seq2SeqDraft,
    SuffixDraft,
    TranslatedDraft,
)
from cluster.control.length import LengthControl
from cluster.draft.blend import ExpectedOffer
from cluster.draft.candidates import Candidates
from cluster.draft.first import FirstOffer
from cluster.draft.model import ModelProposer, QuantizedProposer
from cluster.draft.ngram import NgramProposer
from cluster.draft.proposer import Combiner, Proposer
from cluster.draft.recycling import RecyclingProposer
from cluster.draft.seq2seq import Seq2SeqProposer
from cluster.draft.suffix.native import TrieMaker
from cluster.draft.suffix.proposer import SuffixProposer
from cluster.draft.suffix.trie import Limits as TrieLimits
from cluster.draft.suffix.trie import Wish
from cluster.draft.translate import TranslatedProposer, TranslatedSeq2Seq
from cluster.engine import Engine, Parts
from cluster.errors import ConfigError
from cluster.kernels.library import open_library
from cluster.model.device import resolve_device, resolve_dtype
from cluster.model.files import ModelFiles
from cluster.model.info import ModelInfo
from cluster.model.load import locate, read_config
from cluster.model.processors import LogitsProcessor, Vocabulary
from cluster.model.quantize import Bits
from cluster.model.seq2seq import load_seq2seq
from cluster.model.torch_runner import block_bytes
from cluster.sched.policy import ByPriority, Fair, Fcfs, Policy
from cluster.sched.scheduler import Limits, Scheduler
from cluster.text.tokenizer import Tokenizer
from cluster.verify.judge import Judge
from cluster.verify.plugged import load_processors

Progress = Callable[[str], None]

#: Orders by the name they have in scheduler.policy.
_POLICIES: Mapping[str, Callable[[], Policy]] = {"fcfs": Fcfs, "priority": ByPriority}


def silent(message: str) -> None:
    """Report no progress."""


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
    """A working engine and what its callers need beside it."""

    engine: Engine
    tokenizer: Tokenizer
    resolved: Resolved


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
    _refuse_elsewhere(config)
    proposers = [_proposer(config, draft, target, tokenizer, progress) for draft in config.drafts]
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
    return Assembly(_engine(config, target, proposers, tokenizer, plugged), tokenizer, resolved)


def _refuse_elsewhere(config: EngineConfig) -> None:
    for index, draft in enumerate(config.drafts):
        if isinstance(draft, DraftingConfig) and draft.drafter.place != "local":
            raise ConfigError(
                f"drafts.{index}.drafter.place={draft.drafter.place}: this engine has one process only; leave it out"
            )


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
    limits = Limits(config.scheduler.max_sequences, config.scheduler.max_waiting)
    return Engine(
        Parts(
            runner=target.runner,
            cache=target.cache,
            scheduler=Scheduler(target.cache, limits, _policy(config.scheduler)),
            judge=Judge(target.info.vocab_size, tokenizer.eos_ids, tokenizer.stream, plugged, tokenizer.lexicon),
            proposer=_combine(config, proposers),
            control=LengthControl(config.knobs.knobs()),
            max_context=target.max_context,
            close=target.close,
        )
    )


def _combine(config: EngineConfig, proposers: list[Proposer]) -> Combiner:
    return ExpectedOffer(proposers) if config.blend == "expected" else FirstOffer(proposers)


def _policy(config: SchedulerConfig) -> Policy:
    policy = _POLICIES[config.policy]()
    return Fair(policy) if config.fair else policy


def _proposer(
    config: EngineConfig, draft: DraftConfig, target: Model, tokenizer: Tokenizer, progress: Progress
) -> Proposer:
    match draft:
        case NgramDraft():
            return NgramProposer(draft.max_match, draft.min_match)
        case SuffixDraft():
            return _suffix_proposer(draft)
        case RecyclingDraft():
            return RecyclingProposer(draft.max_pairs, draft.successors)
        case ModelDraft():
            return _model_proposer(config, draft, target, tokenizer, progress)
        case QuantizedDraft():
            return _quantized_proposer(config, draft, target, tokenizer, progress)
        case TranslatedDraft():
            return _translated_proposer(config, draft, target, tokenizer, progress)
        case Seq2SeqDraft():
            return _seq2seq_proposer(config, draft, target, tokenizer, progress)


def _suffix_proposer(draft: SuffixDraft) -> SuffixProposer:
    past = TrieLimits(draft.max_depth, draft.past_tokens, draft.past_requests)
    wish = Wish(draft.max_tokens, draft.factor, draft.offset, draft.min_prob, "tree" if draft.tree else "path")
    return SuffixProposer(wish, past, TrieLimits(draft.max_depth, draft.own_tokens, 1))


def _candidates(draft: DraftingConfig) -> Candidates:
    return Candidates(
        draft.temperature, draft.top_k, draft.top_p, draft.max_tokens, draft.min_confidence, draft.confidence
    )


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.eos_ids, tokenizer.lexicon)


def _dtype(draft: ModelDraft | TranslatedDraft | Seq2SeqDraft, target: Model) -> str:
    return draft.dtype if draft.dtype != "auto" else target.info.dtype


def _model_proposer(
    config: EngineConfig, draft: ModelDraft, target: Model, tokenizer: Tokenizer, progress: Progress
) -> ModelProposer:
    own = draft.model == "target"
    files = locate(config.target.model if own else draft.model, progress)
    if not own:
        tokenizer.check_same(Tokenizer.load(files.directory))
    layers = None
    if draft.layers is not None:
        total = read_config(files).num_hidden_layers
        layers = draft.layers.of(total)
        progress(f"loading draft {files.name}: layers {', '.join(map(str, layers))} of {total}")
    else:
        progress(f"loading draft {files.name}")
    blocks = target.cache.counts.total
    model = load(config, files, _dtype(draft, target), layers=layers, blocks=blocks, bits=draft.bits)
    # One tokenizer, but either model may be padded with ids that no text has.
    return ModelProposer(
        model.runner, model.cache, model.max_context, _candidates(draft), target.info.vocab_size, _vocabulary(tokenizer)
    )


def _quantized_proposer(
    config: EngineConfig, draft: QuantizedDraft, target: Model, tokenizer: Tokenizer, progress: Progress
) -> QuantizedProposer:
    files = locate(config.target.model, progress)
    progress(f"loading draft {files.name} in {draft.bits} bits")
    model = load(config, files, target.info.dtype, blocks=target.cache.counts.total, bits=draft.bits)
    return QuantizedProposer(
        model.runner, model.cache, model.max_context, _candidates(draft), vocabulary=_vocabulary(tokenizer)
    )


def _translated_proposer(
    config: EngineConfig, draft: TranslatedDraft, target: Model, tokenizer: Tokenizer, progress: Progress
) -> TranslatedProposer:
    files = locate(draft.model, progress)
    progress(f"loading draft {files.name} with its own tokenizer")
    theirs = Tokenizer.load(files.directory)
    model = load(config, files, _dtype(draft, target), blocks=target.cache.counts.total, bits=draft.bits)
    theirs.check(model.info.vocab_size)
    inner = ModelProposer(model.runner, model.cache, model.max_context, _candidates(draft), theirs.vocab_size)
    return TranslatedProposer(inner, tokenizer, theirs, greedy=draft.temperature is None)


def _seq2seq_proposer(
    config: EngineConfig, draft: Seq2SeqDraft, target: Model, tokenizer: Tokenizer, progress: Progress
) -> Proposer:
    files = locate(draft.model, progress)
    progress(f"loading draft {files.name}, an encoder-decoder")
    device = resolve_device(config.target.device)
    model = load_seq2seq(files, dtype=resolve_dtype(_dtype(draft, target), device, None), device=device)
    theirs = Tokenizer.load(files.directory)
    theirs.check(model.vocab_size)
    held = config.scheduler.max_sequences
    if tokenizer.same_as(theirs):
        vocab_size, vocabulary = target.info.vocab_size, _vocabulary(tokenizer)
        return Seq2SeqProposer(model, held, _candidates(draft), theirs.frame, vocab_size, vocabulary)
    inner = Seq2SeqProposer(model, held, _candidates(draft), ((), theirs.frame[1]), theirs.vocab_size)
    greedy = draft.temperature is None
    return TranslatedSeq2Seq(inner, tokenizer, theirs, greedy=greedy, append_only=False)
