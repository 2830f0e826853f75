"""Encoder-decoder models, one sequence at a time: the prompt is read once, the decoder goes on from it.

Knows: transformers' encoder-decoder classes and their cache, and how to take back decoder tokens.
Refuses to know: drafts, sampling, text. Only drafters use it; the engine's target is a decoder.

Legend of shape suffixes: T tokens of a call, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from cluster.errors import ModelCorrupt, ModelUnsupported
from cluster.model.files import ModelFiles, verify_manifest
from cluster.model.quiet import quiet_transformers

#: Context of families whose positions are relative, and which therefore state none.
_UNBOUNDED = 1 << 30


@dataclass(slots=True)
class Recall:
    """One sequence's memory: what the encoder made of its prompt, and the decoder's keys and values.

    length: decoder tokens in the cache, the start token included.
    """

    encoded: Any
    cache: Any
    length: int = 0


class Seq2SeqModel:
    """A loaded encoder-decoder in eval mode."""

    def __init__(self, module: Any) -> None:
        self._module = module
        config = module.config
        self.vocab_size: int = config.vocab_size
        self.start_id: int = config.decoder_start_token_id
        self.max_context: int = getattr(config, "max_position_embeddings", None) or _UNBOUNDED

    @torch.inference_mode()
    def read(self, prompt: list[int]) -> Recall:
        """Encode a prompt. Its ids must lie below vocab_size, and there must be at most max_context."""
        ids_1T = torch.tensor([prompt], device=self._module.device)
        encoded = self._module.get_encoder()(input_ids=ids_1T)
        return Recall(encoded, EncoderDecoderCache(DynamicCache(), DynamicCache()))

    @torch.inference_mode()
    def feed(self, recall: Recall, tokens: list[int]) -> torch.Tensor:
        """Let the decoder read `tokens` next; float32 logits [V] after the last of them."""
        output = self._module(
            encoder_outputs=recall.encoded,
            decoder_input_ids=torch.tensor([tokens], device=self._module.device),
            cache=recall.cache,
            use_cache=True,
        )
        recall.length += len(tokens)
        logits_V: torch.Tensor = output.logits[0, -1].float()
        return logits_V

    def rewind(self, recall: Recall, length: int) -> None:
        """Forget all decoder tokens but the first `length`."""
        if length == 0:
            recall.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        elif length < recall.length:
            recall.cache.self_attention_cache.crop(length - recall.length)
        recall.length = min(length, recall.length)


def load_seq2seq(files: ModelFiles, *, dtype: torch.dtype, device: torch.device) -> Seq2SeqModel:
    """Load an encoder-decoder from a directory of safetensors.

    Raises ModelCorrupt, ModelUnsupported when the model is of another kind.
    """
    verify_manifest(files.directory)
    directory = str(files.directory)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            if not config.is_encoder_decoder:
                raise ModelUnsupported(f"{files.name} (model_type {config.model_type}) is no encoder-decoder")
            module = AutoModelForSeq2SeqLM.from_pretrained(
                directory, config=config, dtype=dtype, local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelCorrupt(f"{files.directory}: cannot be loaded as an encoder-decoder: {error}") from error
    if config.decoder_start_token_id is None:
        raise ModelUnsupported(f"{files.name}: its config.json names no decoder_start_token_id")
    return Seq2SeqModel(module.eval().requires_grad_(False).to(device))
