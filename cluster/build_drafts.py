"""From a configuration to whoever drafts: in the target's process, or in one of its own.

Knows: every constructor of a proposer, what it needs to know of the target, and when a drafter drafts.
Refuses to know: the engine, and how channels cross to a drafter (actors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.build_model import load, use_threads
from cluster.config import EngineConfig
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
from cluster.draft.branching import Branching
from cluster.draft.candidates import Candidates
from cluster.draft.lookahead import Lookahead, Pearl
from cluster.draft.model import ModelProposer, QuantizedProposer
from cluster.draft.ngram import NgramProposer
from cluster.draft.proposer import Proposer
from cluster.draft.recycling import RecyclingProposer
from cluster.draft.remote import RemoteProposer
from cluster.draft.seq2seq import Seq2SeqProposer
from cluster.draft.server import DraftServer, Strategy, Sync
from cluster.draft.suffix.proposer import SuffixProposer
from cluster.draft.suffix.trie import Limits as TrieLimits
from cluster.draft.suffix.trie import Wish
from cluster.draft.translate import TranslatedProposer, TranslatedSeq2Seq
from cluster.errors import BrokenInvariant
from cluster.kernels.library import open_library
from cluster.model.device import resolve_device, resolve_dtype
from cluster.model.load import locate, read_config
from cluster.model.processors import Vocabulary
from cluster.model.seq2seq import load_seq2seq
from cluster.text.tokenizer import Tokenizer

Progress = Callable[[str], None]

#: When a drafter drafts, by `drafts[].drafter.mode`.
_STRATEGIES: Mapping[str, Callable[[Proposer], Strategy]] = {
    "sync": Sync,
    "lookahead": Lookahead,
    "pearl": Pearl,
}


def silent(message: str) -> None:
    """Report no progress."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a proposer is made, and what it has to know of the target.

    config: with the device of this process as `target.device`. dtype: the target's, by name.
    blocks: of a draft model's cache; None: as the cache's configuration and the memory here allow.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    vocab_size: int
    dtype: str
    blocks: int | None
    progress: Progress = silent


def open_drafts(site: Site) -> tuple[list[Proposer], dict[int, RemoteProposer]]:
    """All drafts in order, and those of them, by position, whose drafters are still to be attached."""
    remote: dict[int, RemoteProposer] = {}
    proposers: list[Proposer] = []
    for index, draft in enumerate(site.config.drafts):
        if isinstance(draft, DraftingConfig) and draft.drafter.place != "local":
            remote[index] = RemoteProposer(draft.kind, draft.drafter.wait_ms / 1e3)
        proposers.append(remote[index] if index in remote else make_proposer(draft, site))
    return proposers, remote


def assemble_drafter(config: EngineConfig, index: int, progress: Progress = silent) -> DraftServer:
    """What drafts in a process of its own for position `index` of `drafts`: attach verifiers, and run it.

    config: the engine's, with the device and threads of this process as the target's. Sets torch's thread count.
    Raises ConfigError, ModelError and its kinds, CapacityError.
    """
    draft = config.drafts[index]
    if not isinstance(draft, DraftingConfig):
        raise BrokenInvariant(f"drafts.{index} is of kind {draft.kind}, which has no model to give a process to")
    target = config.target
    config = config.model_copy(update={"target": target.model_copy(update={"tensor_parallel": 1})})
    device = resolve_device(target.device)
    use_threads(config)
    if device.type == "cpu":
        open_library(lambda: progress("compiling kernels"))
    files = locate(target.model, progress)
    facts = read_config(files)
    tokenizer = Tokenizer.load((files if target.tokenizer is None else locate(target.tokenizer)).directory)
    dtype = str(resolve_dtype(target.dtype, device, facts.dtype)).removeprefix("torch.")
    proposer = make_proposer(draft, Site(config, tokenizer, facts.vocab_size, dtype, None, progress))
    return DraftServer(proposer, _STRATEGIES[draft.drafter.mode](proposer))


def make_proposer(draft: DraftConfig, site: Site) -> Proposer:
    """The proposer of one draft, in this process. Raises ConfigError, ModelError and its kinds, CapacityError."""
    match draft:
        case NgramDraft():
            return NgramProposer(draft.max_match, draft.min_match)
        case SuffixDraft():
            return _suffix_proposer(draft)
        case RecyclingDraft():
            return RecyclingProposer(draft.max_pairs, draft.successors)
        case ModelDraft():
            return _model_proposer(draft, site)
        case QuantizedDraft():
            return _quantized_proposer(draft, site)
        case TranslatedDraft():
            return _translated_proposer(draft, site)
        case Seq2SeqDraft():
            return _seq2seq_proposer(draft, site)


def _suffix_proposer(draft: SuffixDraft) -> SuffixProposer:
    past = TrieLimits(draft.max_depth, draft.past_tokens, draft.past_requests)
    wish = Wish(draft.max_tokens, draft.factor, draft.offset, draft.min_prob, "tree" if draft.tree else "path")
    return SuffixProposer(wish, past, TrieLimits(draft.max_depth, draft.own_tokens, 1))


def _candidates(draft: DraftingConfig) -> Candidates:
    return Candidates(
        draft.temperature, draft.top_k, draft.top_p, draft.max_tokens, draft.min_confidence, draft.confidence
    )


def _branching(draft: ModelDraft | QuantizedDraft) -> Branching | None:
    return None if draft.tree is None else Branching(draft.tree.width, draft.tree.nodes, draft.tree.depth)


def _vocabulary(site: Site) -> Vocabulary:
    return Vocabulary(site.tokenizer.eos_ids, site.tokenizer.lexicon)


def _dtype(draft: ModelDraft | TranslatedDraft | Seq2SeqDraft, site: Site) -> str:
    return draft.dtype if draft.dtype != "auto" else site.dtype


def _model_proposer(draft: ModelDraft, site: Site) -> ModelProposer:
    own = draft.model == "target"
    files = locate(site.config.target.model if own else draft.model, site.progress)
    if not own:
        site.tokenizer.check_same(Tokenizer.load(files.directory))
    layers = None
    if draft.layers is not None:
        total = read_config(files).num_hidden_layers
        layers = draft.layers.of(total)
        site.progress(f"loading draft {files.name}: layers {', '.join(map(str, layers))} of {total}")
    else:
        site.progress(f"loading draft {files.name}")
    model = load(site.config, files, _dtype(draft, site), layers=layers, blocks=site.blocks, bits=draft.bits)
    # One tokenizer, but either model may be padded with ids that no text has.
    return ModelProposer(
        model.runner,
        model.cache,
        model.max_context,
        _candidates(draft),
        site.vocab_size,
        _vocabulary(site),
        _branching(draft),
    )


def _quantized_proposer(draft: QuantizedDraft, site: Site) -> QuantizedProposer:
    files = locate(site.config.target.model, site.progress)
    site.progress(f"loading draft {files.name} in {draft.bits} bits")
    model = load(site.config, files, site.dtype, blocks=site.blocks, bits=draft.bits)
    return QuantizedProposer(
        model.runner,
        model.cache,
        model.max_context,
        _candidates(draft),
        vocabulary=_vocabulary(site),
        branching=_branching(draft),
    )


def _translated_proposer(draft: TranslatedDraft, site: Site) -> TranslatedProposer:
    files = locate(draft.model, site.progress)
    site.progress(f"loading draft {files.name} with its own tokenizer")
    theirs = Tokenizer.load(files.directory)
    model = load(site.config, files, _dtype(draft, site), blocks=site.blocks, bits=draft.bits)
    theirs.check(model.info.vocab_size)
    inner = ModelProposer(model.runner, model.cache, model.max_context, _candidates(draft), theirs.vocab_size)
    return TranslatedProposer(inner, site.tokenizer, theirs, greedy=draft.temperature is None)


def _seq2seq_proposer(draft: Seq2SeqDraft, site: Site) -> Proposer:
    files = locate(draft.model, site.progress)
    site.progress(f"loading draft {files.name}, an encoder-decoder")
    device = resolve_device(site.config.target.device)
    model = load_seq2seq(files, dtype=resolve_dtype(_dtype(draft, site), device, None), device=device)
    theirs = Tokenizer.load(files.directory)
    theirs.check(model.vocab_size)
    held = site.config.scheduler.max_sequences
    if site.tokenizer.same_as(theirs):
        vocab_size, vocabulary = site.vocab_size, _vocabulary(site)
        return Seq2SeqProposer(model, held, _candidates(draft), theirs.frame, vocab_size, vocabulary)
    inner = Seq2SeqProposer(model, held, _candidates(draft), ((), theirs.frame[1]), theirs.vocab_size)
    greedy = draft.temperature is None
    return TranslatedSeq2Seq(inner, site.tokenizer, theirs, greedy=greedy, append_only=False)
