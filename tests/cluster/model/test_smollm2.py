"""The real SmolLM2-135M in float32 through the kernels against transformers' own forward pass."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from cluster.kernels.library import open_library
from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.files import ModelFiles
from cluster.model.load import load_model
from cluster.model.torch_runner import TorchRunner, arena_for
from cluster.text.tokenizer import Tokenizer

#: Of any logit. Both sides sum in float32, each in its own order, through 30 layers; logits reach 42. Measured
#: here: 1.4e-4 at most. Other processors add in yet other orders, hence a margin of seven.
TOLERANCE = 1e-3
TEXT = (Path(__file__).parents[3] / "LICENSE").read_text()
CHUNKS = (128, 1, 150, 41)  # of the prompt: 320 tokens, more than one span of the attention kernel
DECODED = 6


def test_chunked_prefill_and_decoding_give_transformers_logits(smollm2: ModelFiles) -> None:
    if open_library() is None:
        pytest.fail("no C++ compiler: the kernels cannot be tested here")
    loaded = load_model(smollm2, dtype=torch.float32, device=torch.device("cpu"))
    stock = copy.deepcopy(loaded.module)
    runner = TorchRunner(loaded, arena_for(loaded.info, 16))
    tokens = list(Tokenizer.load(smollm2.directory).encode(TEXT))[: sum(CHUNKS)]
    pieces = []
    first = 0
    for count in (*CHUNKS, *(1,) * DECODED):
        row = PlanRow(0, first, tuple(tokens[first : first + count]), tuple(range(16)), wants=count)
        pieces.append(runner.launch(Plan(0, (row,), Knobs())).logits_NV)
        first += count
        if first == len(tokens):
            tokens.append(int(pieces[-1][-1].argmax()))
    with torch.inference_mode():
        expected = stock(torch.tensor([tokens[:first]]), use_cache=False).logits[0]
    got = torch.cat(pieces)
    assert got.shape == expected.shape == (sum(CHUNKS) + DECODED, loaded.info.vocab_size)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
