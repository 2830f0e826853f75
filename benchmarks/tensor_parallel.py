"""How far the logits of a model divided among ranks are from those of one, in float32.

    python -m benchmarks.tensor_parallel --out results

Per model and number of ranks: the largest difference of any logit, beside the largest logit, over two
sequences side by side, one of them in chunks and single tokens. SmolLM2, and a tiny random model of
every family that can be divided: 4 query heads over 2 key/value heads, so that 3 ranks split a group
and 4 hold copies of heads. The ranks are threads of this process with groups over real sockets.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.protocol import report
from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.load import load_model, locate
from cluster.model.runner import Runner
from cluster.model.torch_runner import TorchRunner
from tests.ranks import BLOCK, CPU, poisoned, sharded
from tests.tiny import make_tiny

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "mixtral", "qwen3_moe",
)  # fmt: skip
RANKS = (2, 3, 4)
PROMPT = 48
CUTS = (0, 17, 18, 40, 41, PROMPT)


def logits(runner: Runner) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(0, runner.vocab_size, (PROMPT,), generator=generator).tolist() for _ in range(2))
    found = [runner.launch(Plan(0, (_row(1, second, 0, PROMPT),), Knobs())).logits_NV]
    for begin, end in itertools.pairwise(CUTS):
        rows = (_row(0, first, begin, end), _row(1, second, PROMPT - 1, PROMPT))
        found.append(runner.launch(Plan(0, rows, Knobs())).logits_NV)
    return torch.cat(found)


def _row(which: int, tokens: list[int], begin: int, end: int) -> PlanRow:
    blocks = -(-PROMPT // BLOCK)
    table = tuple(range(which * blocks, (which + 1) * blocks))
    return PlanRow(which, begin, tuple(tokens[begin:end]), table, wants=end - begin)


def measure(name: str, source: str) -> list[dict[str, object]]:
    loaded = load_model(locate(source), dtype=torch.float32, device=CPU)
    expected = logits(TorchRunner(loaded, poisoned(loaded)))
    largest = float(expected.abs().max())
    records: list[dict[str, object]] = []
    for ranks in RANKS:
        with sharded(source, ranks) as runner:
            worst = float((logits(runner) - expected).abs().max())
        records.append({"model": name, "ranks": ranks, "max_difference": worst, "largest_logit": largest})
    differences = "".join(f"{record['max_difference']:10.1e}" for record in records)
    print(f"{name:<14}{largest:9.1f}{differences}", flush=True)
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias or directory (default: %(default)s)")
    parser.add_argument("--families", nargs="*", default=FAMILIES, metavar="F", help="of tiny models (default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the report goes")
    arguments = parser.parse_args()
    print(f"{'model':<14}{'largest':>9}" + "".join(f"{ranks:>4} ranks" for ranks in RANKS))
    records = measure(arguments.model, arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        for family in arguments.families:
            records += measure(family, str(make_tiny(Path(folder) / family, family)))
    report("tensor_parallel", arguments.out, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
