"""Turns one GGUF file into a safetensors directory, once, through transformers.

Knows: what a directory needs so that it loads without the GGUF: config, weights, tokenizer, chat
template, and which tokens end an answer.
Refuses to know: where the GGUF came from and where the directory will live.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Callable
from pathlib import Path

from cluster.errors import CapacityError, ModelCorrupt, ModelUnsupported
from cluster.model.quiet import quiet_transformers

_SHARD = 2**30  # bytes a file


def convert_gguf(gguf: Path, directory: Path, end_tokens: tuple[str, ...], progress: Callable[[str], None]) -> None:
    """Write `gguf`, dequantised to float32, into `directory` in the layout transformers loads.

    end_tokens: tokens of the vocabulary that end an answer, beside the eos the file names.
    Raises: ModelCorrupt when the file cannot be read, ModelUnsupported when transformers does not
    know its architecture or its vocabulary lacks an end token, CapacityError when memory is short.
    """
    with gguf.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelCorrupt(f"{gguf} ({gguf.stat().st_size} bytes) is not a GGUF file: it starts with {magic!r}")
    try:
        with quiet_transformers():
            _convert(gguf, directory, end_tokens, progress)
    except (ValueError, IndexError, KeyError, EOFError, struct.error, OSError) as error:
        raise ModelCorrupt(f"{gguf} ({gguf.stat().st_size} bytes) cannot be read as GGUF: {error!r}") from error


def _convert(gguf: Path, directory: Path, end_tokens: tuple[str, ...], progress: Callable[[str], None]) -> None:
    # transformers takes seconds to import: a start that finds the cache whole must not pay for it here.
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    progress(f"converting {gguf.name} to safetensors, once: reading its tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    vocabulary = tokenizer.get_vocab()
    unknown = [token for token in end_tokens if token not in vocabulary]
    if unknown:
        raise ModelUnsupported(f"{gguf.name} has no token {', '.join(unknown)}, which should end its answers")
    eos = {vocabulary[token] for token in end_tokens}
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    tokenizer.save_pretrained(directory)

    progress(f"converting {gguf.name} to safetensors, once: reading its configuration")
    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _require_memory(gguf, sum(weight.nbytes for weight in skeleton.parameters()) + 2 * _SHARD)
    progress(f"converting {gguf.name} to safetensors, once: dequantising its tensors")
    with contextlib.redirect_stderr(io.StringIO()):  # it draws a progress bar that no setting switches off
        loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=skeleton, torch_dtype=torch.float32)

    progress(f"converting {gguf.name} to safetensors, once: writing float32 weights")
    weights = {name: tensor.contiguous() for name, tensor in loaded.pop("tensors").items()}
    # In shards, because writing one takes as much memory again.
    save_torch_state_dict(weights, directory, max_shard_size=_SHARD)
    config.architectures = [type(skeleton).__name__]
    config.dtype = torch.float32
    config.eos_token_id = sorted(eos)
    for stale in ("quantization_config", "_name_or_path"):
        if hasattr(config, stale):
            delattr(config, stale)
    config.save_pretrained(directory)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=sorted(eos), pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(directory)


def _require_memory(gguf: Path, needed: int) -> None:
    import torch

    from cluster.model.device import available_memory

    free = available_memory(torch.device("cpu"))
    if needed > free:
        raise CapacityError(
            f"converting {gguf.name} takes {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
        )
