"""How long one step of the runner takes, against the time its bytes need, and against transformers.

    python -m benchmarks.step --model smollm2-135m --dtype bfloat16 --out step.json

Steps: every row decodes one token after `context` known ones. `floor_ms` is the time to read the
weights and the rows' keys and values once at the memory bandwidth measured in the same run.
Generation: greedy, the same random prompts of 64 tokens, 16 new tokens each; transformers'
`generate` (sdpa attention, dynamic cache) against a bare loop over the runner; the two take turns
and medians are reported, progress as it goes. `agree` is the share of rows with the same text: near-ties part ways.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from cluster.kernels.library import open_library
from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.load import LoadedModel, load_model, locate
from cluster.model.torch_runner import TorchRunner, arena_for, block_bytes

ROWS = (1, 2, 5, 9, 32)
CONTEXTS = (128, 1024)
BATCHES = (1, 8, 32)
PROMPT, NEW, BLOCK = 64, 16, 32
STEPS = 7  # of each number of rows


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bandwidth(gigabytes: float = 0.5) -> float:
    """Bytes a second that all threads together read from memory."""
    numbers = torch.ones(int(gigabytes * 2**28))
    return numbers.nbytes / median_seconds(numbers.sum, 5)


def step_times(runner: TorchRunner, info: Any, weight_bytes: int, rate: float) -> list[dict[str, float]]:
    per_token = block_bytes(info, block_tokens=BLOCK) / BLOCK
    found = []
    for context in CONTEXTS:
        need = -(-(context + 1) // BLOCK)
        for rows in ROWS:
            table = [tuple(range(row * need, (row + 1) * need)) for row in range(rows)]
            plan = Plan(0, tuple(PlanRow(r, context, (7,), table[r], wants=1) for r in range(rows)), Knobs())
            runner.launch(plan)
            floor = (weight_bytes + rows * context * per_token) / rate
            seconds = median_seconds(lambda plan=plan: runner.launch(plan), STEPS)
            found.append({"rows": rows, "context": context, "ms": seconds * 1e3, "floor_ms": floor * 1e3})
            print(found[-1], file=sys.stderr)
    return found


def decode(runner: TorchRunner, prompts: torch.Tensor) -> torch.Tensor:
    """Greedy continuations by a bare loop, [batch, NEW]."""
    need = -(-(PROMPT + NEW) // BLOCK)
    tables = [tuple(range(row * need, (row + 1) * need)) for row in range(len(prompts))]
    feed, first, out = prompts.tolist(), 0, []
    for step in range(NEW):
        rows = tuple(PlanRow(r, first, tuple(feed[r]), tables[r], wants=1) for r in range(len(tables)))
        chosen = runner.launch(Plan(step, rows, Knobs())).logits_NV.argmax(-1)
        first += len(feed[0])
        feed = [[token] for token in chosen.tolist()]
        out.append(chosen)
    return torch.stack(out, 1)


def generation(stock: Any, runner: TorchRunner, batches: Sequence[int], repeats: int) -> list[dict[str, float]]:
    found = []
    for batch in batches:
        prompts = torch.randint(
            10, stock.config.vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(0)
        )

        def theirs(prompts: torch.Tensor = prompts) -> torch.Tensor:
            with torch.inference_mode():
                options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
                mask = torch.ones_like(prompts)
                return stock.generate(prompts, attention_mask=mask, eos_token_id=None, **options)[:, PROMPT:]

        def ours(prompts: torch.Tensor = prompts) -> torch.Tensor:
            return decode(runner, prompts)

        same = (theirs() == ours()).all(-1).float().mean().item()
        pairs = []
        for _ in range(repeats):
            pairs.append((median_seconds(theirs, 1), median_seconds(ours, 1)))
            print(f"batch {batch}: transformers {pairs[-1][0]:.2f} s, runner {pairs[-1][1]:.2f} s", file=sys.stderr)
        stock_rate, our_rate = (batch * NEW / statistics.median(side) for side in zip(*pairs, strict=True))
        entry = {"batch": batch, "transformers": stock_rate, "runner": our_rate, "ratio": our_rate / stock_rate}
        found.append(entry | {"agree": same})
        print(found[-1], file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3, help="turns each engine takes at each batch size")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="prompts generated together")
    parser.add_argument("--no-kernels", action="store_true", help="the plain path: what the kernels bring")
    parser.add_argument("--out", type=Path, help="where the JSON goes; standard output if left out")
    options = parser.parse_args()
    files, dtype, cpu = locate(options.model), getattr(torch, options.dtype), torch.device("cpu")
    if not options.no_kernels:
        open_library()  # built before anything is timed
    stock = load_model(files, dtype=dtype, device=cpu).module
    loaded = load_model(files, dtype=dtype, device=cpu)
    weight_bytes = sum(parameter.nbytes for parameter in loaded.module.parameters())
    longest = -(-(max(CONTEXTS) + 1) // BLOCK) * max(ROWS)
    arena = arena_for(loaded.info, longest, block_tokens=BLOCK)
    for block in range(longest):
        arena.block(block).zero_()
    runner = TorchRunner(LoadedModel(loaded.module, loaded.info), arena, kernels=not options.no_kernels)
    rate = bandwidth()
    report = {
        "command": "python -m benchmarks.step " + " ".join(sys.argv[1:]),
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": options.model,
        "dtype": options.dtype,
        "kernels": not options.no_kernels,
        "bandwidth_gb_s": rate / 1e9,
        "weight_mb": weight_bytes / 1e6,
        "generation_tokens_per_second": generation(stock, runner, options.batches, options.repeats),
        "steps": step_times(runner, loaded.info, weight_bytes, rate),
    }
    text = json.dumps(report, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
