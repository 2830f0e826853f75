"""Tokens a second: ours without speculation against transformers `generate`, and with against without.

Every contender takes the same prompts in turn within one process (interleaved); the ratio is the
median of the ratios taken repeat by repeat. Prefill is included, end of text respected, prefix
caches emptied before each run. Absolute figures mean little on a shared machine; ratios do.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.protocol import Outcome, Prompt, arguments, interleave, paired_ratio, read_prompts, report, run
from cluster.build import Assembly, assemble
from cluster.config import EngineConfig, KnobConfig, SchedulerConfig, TargetConfig
from cluster.model.load import load_model, locate
from cluster.request import Request, Sampling, Speculation

BATCHES = (1, 8, 32)


class Stock:
    """transformers as it comes: sdpa attention, dynamic cache, left padding."""

    def __init__(self, made: Assembly, model: str) -> None:
        dtype = getattr(torch, made.resolved.model.dtype)
        self._module = load_model(locate(model), dtype=dtype, device=torch.device("cpu")).module
        self._eos = sorted(made.tokenizer.eos_ids)

    def speed(self, prompts: Sequence[Prompt], tokens: int) -> float:
        width = max(len(prompt.ids) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(p.ids)) + list(p.ids) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts])
        start = time.perf_counter()
        out = self._module.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=self._eos,
            pad_token_id=self._eos[0],
        )
        seconds = time.perf_counter() - start
        return sum(self._length(row) for row in out[:, width:].tolist()) / seconds

    def _length(self, row: Sequence[int]) -> int:
        ends = [at for at, token in enumerate(row) if token in self._eos]
        return ends[0] + 1 if ends else len(row)


def requests(prompts: Sequence[Prompt], tokens: int, speculate: bool) -> list[Request]:
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    return [Request(prompt.name, prompt.ids, sampling, Speculation(enabled=speculate)) for prompt in prompts]


def groups(prompts: Sequence[Prompt], size: int, repeats: int) -> list[list[Prompt]]:
    """`repeats` groups of `size`, walking round the prompts; names made unique within a group."""
    made = []
    for repeat in range(repeats):
        picked = [prompts[(repeat * size + i) % len(prompts)] for i in range(size)]
        made.append([replace(prompt, name=f"{i}:{prompt.name}") for i, prompt in enumerate(picked)])
    return made


def against_stock(made: Assembly, stock: Stock, prompts: Sequence[Prompt], tokens: int, repeats: int) -> list[object]:
    rows: list[object] = []
    for batch in BATCHES:
        sets = groups(prompts, batch, repeats)
        figures = interleave(
            {
                "outrider": lambda i, s=sets: run(made.engine, requests(s[i], tokens, False)).speed,
                "transformers": lambda i, s=sets: stock.speed(s[i], tokens),
            },
            repeats,
        )
        ratio = paired_ratio(figures["outrider"], figures["transformers"])
        print(
            f"batch {batch:2d}: outrider {statistics.median(figures['outrider']):7.1f} tokens/s, transformers "
            f"{statistics.median(figures['transformers']):7.1f}, ratio {ratio:.2f}",
            flush=True,
        )
        rows.append({"batch": batch, "ratio": ratio, **figures})
    return rows


def speculation(made: Assembly, prompts: Sequence[Prompt], tokens: int, repeats: int) -> list[object]:
    rows: list[object] = []
    kind = prompts[0].kind
    for batch in (1, 8):
        sets = groups(prompts, batch, repeats)
        outcomes: list[Outcome] = []

        def drafting(i: int, s: list[list[Prompt]] = sets, kept: list[Outcome] = outcomes) -> float:
            kept.append(run(made.engine, requests(s[i], tokens, True)))
            return kept[-1].speed

        figures = interleave(
            {"with": drafting, "without": lambda i, s=sets: run(made.engine, requests(s[i], tokens, False)).speed},
            repeats,
        )
        ratio = paired_ratio(figures["with"], figures["without"])
        tau = statistics.mean(outcome.tau for outcome in outcomes)
        acceptance = statistics.mean(outcome.acceptance for outcome in outcomes)
        print(
            f"{kind} batch {batch}: with/without speculation {ratio:.2f}, tau {tau:.2f}, acceptance {acceptance:.2f}",
            flush=True,
        )
        rows.append({"kind": kind, "batch": batch, "ratio": ratio, "tau": tau, "acceptance": acceptance, **figures})
    return rows


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    made = assemble(
        EngineConfig(
            target=TargetConfig(model=options.model, dtype=options.dtype),
            scheduler=SchedulerConfig(max_sequences=max(BATCHES)),
            knobs=KnobConfig(k=8),
        )
    )
    print("\n".join(made.resolved.lines()), flush=True)
    stock = Stock(made, options.model)
    code = read_prompts(options.data, "code", made.tokenizer)
    chat = read_prompts(options.data, "chat", made.tokenizer)
    mixed = [prompt for pair in zip(code, chat, strict=False) for prompt in pair]
    results = {
        "resolved": made.resolved.lines(),
        "against_transformers": against_stock(made, stock, mixed, options.tokens, options.repeats),
        "speculation": [
            row
            for prompts in (code, chat)
            for row in speculation(made, prompts, options.tokens, max(options.repeats, 8))
        ],
    }
    report(f"throughput-{made.resolved.model.dtype}", options.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
