"""Trains a small encoder-decoder to draft for the target: none with this vocabulary is published.

The target writes the questions itself, as it would go on after the opening of a user's turn (Magpie, arXiv
2406.08464), and answers them greedily; a T5 of two layers a side learns answers from questions. So the draft has
seen no prompt of any benchmark. What it is for is a row of benchmarks.proposers that is neither copying nor a
second decoder; minutes of training make no good draft.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from benchmarks.protocol import run
from cluster.build import assemble
from cluster.config import EngineConfig, SchedulerConfig, TargetConfig
from cluster.engine import Engine
from cluster.model.load import locate
from cluster.model.quiet import quiet_transformers
from cluster.request import Request, Sampling
from cluster.text.tokenizer import Tokenizer

#: Longest question and answer, in tokens, and labels that count for nothing (torch's own sign for them).
QUESTION, ANSWER, IGNORED = 128, 64, -100
OPENING = "<|im_start|>user\n"

Pair = tuple[tuple[int, ...], tuple[int, ...]]


def conversations(engine: Engine, tokenizer: Tokenizer, count: int) -> list[Pair]:
    """(question with its chat template, answer) in ids."""
    opening = tuple(tokenizer.encode(OPENING))
    free = [Request(f"q{i}", opening, Sampling(max_tokens=48, temperature=1.0, seed=i)) for i in range(count)]
    asked = []
    for name, ids in run(engine, free).tokens.items():
        text = tokenizer.decode([token for token in ids if token not in tokenizer.eos_ids]).strip()
        if text:
            question = tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))[:QUESTION]
            asked.append(Request(name, question, Sampling(max_tokens=ANSWER, temperature=0.0)))
    answers = run(engine, asked).tokens
    return [(request.prompt, answers[request.id]) for request in asked]


def batches(pairs: Sequence[Pair], size: int, padding: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Questions and labels [size, length] without end, in a random order each time round."""
    if len(pairs) < size:
        raise SystemExit(f"{len(pairs)} conversations do not fill a batch of {size}: ask for more with --count")
    order = torch.Generator().manual_seed(0)
    while True:
        shuffled = torch.randperm(len(pairs), generator=order).tolist()
        for start in range(0, len(shuffled) - size + 1, size):
            picked = [pairs[i] for i in shuffled[start : start + size]]
            yield padded([q for q, _ in picked], padding), padded([a for _, a in picked], IGNORED)


def padded(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])


def train(pairs: Sequence[Pair], vocab_size: int, padding: int, options: argparse.Namespace) -> torch.nn.Module:
    config = AutoConfig.for_model(
        "t5",
        vocab_size=vocab_size,
        d_model=options.width,
        d_kv=32,
        d_ff=4 * options.width,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=options.width // 32,
        dropout_rate=0.0,
        decoder_start_token_id=padding,
        eos_token_id=padding,
        pad_token_id=padding,
    )
    torch.manual_seed(0)
    with quiet_transformers():
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    end = time.monotonic() + 60 * options.minutes
    for step, (questions_BT, labels_BT) in enumerate(batches(pairs, options.batch, padding), 1):
        loss = model(input_ids=questions_BT, attention_mask=(questions_BT != padding).long(), labels=labels_BT).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)
        if time.monotonic() > end or step >= options.steps:
            break
    return model


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path, help="directory the draft is saved in")
    add("--target", default="smollm2-135m")
    add("--count", type=int, default=768, help="conversations the target writes")
    add("--minutes", type=float, default=4.0, help="of training, at most")
    add("--steps", type=int, default=2000, help="of training, at most")
    add("--batch", type=int, default=16)
    add("--width", type=int, default=128, help="of the draft; a multiple of 32")
    options = parser.parse_args(argv)
    if options.count < options.batch:
        parser.error(f"--count {options.count}: conversations must fill a --batch of {options.batch}")
    files = locate(options.target)
    tokenizer = Tokenizer.load(files.directory)
    target = TargetConfig(model=options.target, dtype="bfloat16", max_context=1024)
    made = assemble(EngineConfig(target=target, scheduler=SchedulerConfig(max_sequences=32, max_waiting=options.count)))
    pairs = conversations(made.engine, tokenizer, options.count)
    print(f"{len(pairs)} conversations, {sum(len(answer) for _, answer in pairs)} tokens of answers", flush=True)
    model = train(pairs, tokenizer.vocab_size, min(tokenizer.eos_ids), options)
    model.save_pretrained(options.out)  # type: ignore[operator]
    AutoTokenizer.from_pretrained(str(files.directory), local_files_only=True).save_pretrained(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
