"""Tensor parallelism: whatever the number of ranks, the logits are those of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.load import load_model, locate
from cluster.model.runner import Runner
from cluster.model.torch_runner import TorchRunner
from tests.ranks import BLOCK, BLOCKS, CPU, poisoned, sharded

TOLERANCE = 2e-4  # float32, over sums taken in another order
LENGTH = 30
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "olmo2",
    "mixtral",
    "qwen3_moe",
)


def table(which: int) -> tuple[int, ...]:
    need = -(-(LENGTH + 4) // BLOCK)
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
    return tuple(order[which * need : (which + 1) * need])


def logits(runner: Runner, vocab: int) -> torch.Tensor:
    """Of a prompt in chunks beside another sequence, some positions wanted and some not."""
    generator = torch.Generator().manual_seed(1)
    first, second = (tuple(torch.randint(0, vocab, (LENGTH,), generator=generator).tolist()) for _ in range(2))
    found = [launch(runner, row(0, second, 0, LENGTH, 0))]
    for begin, end in itertools.pairwise((0, 9, 10, 22, LENGTH)):
        found.append(launch(runner, row(1, first, begin, end, end - begin), row(0, second, LENGTH - 2, LENGTH, 1)))
    tree = PlanRow(0, LENGTH - 1, (second[-1], *first[:4]), table(0), 4, 5, parents=(-1, 0, 0, 2))
    found.append(launch(runner, tree))
    slots = [table(0)[place // BLOCK] * BLOCK + place % BLOCK for place in range(LENGTH, LENGTH + 4)]
    moves = ((slots[2], slots[1]), (slots[3], slots[2]))  # the path of nodes 0, 2 and 3
    straight = PlanRow(0, LENGTH + 3, (first[4],), table(0), wants=1)
    found.append(runner.launch(Plan(0, (straight,), Knobs(), moves)).logits_NV)
    return torch.cat(found)


def row(which: int, tokens: tuple[int, ...], begin: int, end: int, wants: int) -> PlanRow:
    return PlanRow(which, begin, tokens[begin:end], table(which), wants=wants)


def launch(runner: Runner, *rows: PlanRow) -> torch.Tensor:
    return runner.launch(Plan(0, rows, Knobs())).logits_NV


def alone(source: str | Path) -> TorchRunner:
    loaded = load_model(locate(str(source)), dtype=torch.float32, device=CPU)
    return TorchRunner(loaded, poisoned(loaded))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_three_and_four_ranks_give_the_logits_of_one(tiny_model: Callable[[str], Path], family: str) -> None:
    path = tiny_model(family)
    runner = alone(path)
    expected = logits(runner, runner.vocab_size)
    for size in (2, 3, 4):
        with sharded(path, size) as ranks:
            got = logits(ranks, runner.vocab_size)
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
