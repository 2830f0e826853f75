"""Tensor parallelism: whatever the number of ranks, the logits are those of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import LlamaConfig

from cluster.errors import ModelUnsupported
from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.files import ModelFiles, read_header, weight_files
from cluster.model.load import load_model, locate
from cluster.model.runner import Runner
from cluster.model.shard import Share, deal
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


def alone(source: str | Path, dtype: torch.dtype = torch.float32, *, kernels: bool = True) -> TorchRunner:
    loaded = load_model(locate(str(source)), dtype=dtype, device=CPU)
    return TorchRunner(loaded, poisoned(loaded), kernels=kernels)


def worst(source: str | Path, size: int, expected: torch.Tensor, vocab: int) -> float:
    """The largest difference of any logit over `size` ranks from one."""
    with sharded(source, size) as runner:
        return float((logits(runner, vocab) - expected).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_two_three_and_four_ranks_give_the_logits_of_one(tiny_model: Callable[[str], Path], family: str) -> None:
    """4 query heads over 2 key/value heads: whole groups, a split group, and every head alone."""
    runner = alone(tiny_model(family))
    expected = logits(runner, runner.vocab_size)
    for size in (2, 3, 4):
        assert worst(tiny_model(family), size, expected, runner.vocab_size) < TOLERANCE


def test_nine_heads_over_three_go_to_two_ranks_as_well_as_to_three(smollm2: ModelFiles) -> None:
    runner = alone(smollm2.directory)
    expected = logits(runner, runner.vocab_size)
    for size in (2, 3):
        assert worst(smollm2.directory, size, expected, runner.vocab_size) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "olmo2", "mixtral"])
def test_plain_torch_and_bfloat16_agree_with_one_rank_too(tiny_model: Callable[[str], Path], family: str) -> None:
    path = tiny_model(family)
    runner = alone(path)
    expected = logits(runner, runner.vocab_size)
    with sharded(path, 2, kernels=False) as plain:
        torch.testing.assert_close(logits(plain, runner.vocab_size), expected, atol=TOLERANCE, rtol=0)
    one = logits(alone(path, torch.bfloat16, kernels=False), runner.vocab_size)
    with sharded(path, 2, dtype=torch.bfloat16) as rounded:
        two = logits(rounded, runner.vocab_size)
    assert (two - expected).abs().mean() <= 1.3 * (one - expected).abs().mean()


def test_heads_are_dealt_by_whole_groups_while_there_are_enough() -> None:
    def dealt(queries: int, keys: int, size: int) -> list[tuple[str, str, int]]:
        config = LlamaConfig(num_attention_heads=queries, num_key_value_heads=keys, hidden_size=queries * 2)
        shares = [Share.of(config, rank, size, "m") for rank in range(size)]
        return [(_shown(share.queries), _shown(share.keys), share.copies) for share in shares]

    assert dealt(9, 3, 2) == [("0-5", "0-1", 1), ("6-8", "2-2", 1)]
    assert dealt(9, 3, 3) == [("0-2", "0-0", 1), ("3-5", "1-1", 1), ("6-8", "2-2", 1)]
    assert dealt(9, 3, 4) == [("0-1", "0-0", 2), ("2-2", "0-0", 2), ("3-5", "1-1", 1), ("6-8", "2-2", 1)]
    assert dealt(4, 1, 2) == [("0-1", "0-0", 2), ("2-3", "0-0", 2)]


@given(total=st.integers(1, 5000), size=st.integers(1, 64), unit=st.sampled_from([1, 32]))
def test_a_deal_gives_everything_once_and_nobody_nothing(total: int, size: int, unit: int) -> None:
    runs = deal(total, size, unit)
    assert [at for run in runs for at in run] == list(range(total))
    assert total < size or max(map(len, runs)) - min(map(len, runs)) <= unit


def test_what_cannot_be_divided_is_refused_with_the_numbers(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(family: str, size: int, match: str) -> None:
        with pytest.raises(ModelUnsupported, match=match):
            load_model(locate(str(tiny_model(family))), dtype=torch.float32, device=CPU, rank=0, ranks=size)

    refused(
        "llama", 5, "num_attention_heads=4 cannot be divided among 5 ranks: set target.tensor_parallel to at most 4"
    )
    refused("gpt_oss", 2, "its tensor-parallel plan leaves out attention or feed forward")
    plan = LlamaConfig.base_model_tp_plan
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", {**plan, "layers.*.mlp.up_proj": "diagonal"})
    refused("llama", 2, "style diagonal is not implemented")
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", {**plan, "layers.*.self_attn.o_proj": "colwise"})
    refused("llama", 2, "leaves out attention")


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_a_rank_reads_its_slice_of_the_weights_and_no_more(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    files = locate(str(tiny_model(family)))
    stored = [tensor for path in weight_files(files.directory) for tensor in read_header(path)]
    # Norms and the router are everybody's; all else is divided.
    everybodys = sum(t.nbytes for t in stored if len(t.shape) == 1 or t.name.endswith("moe.gate.weight"))
    divided = sum(tensor.nbytes for tensor in stored) - everybodys
    counts = []
    for rank in range(2):
        read = Reading()
        monkeypatch.setattr("cluster.model.load.safe_open", read.open)
        load_model(files, dtype=torch.float32, device=CPU, rank=rank, ranks=2)
        counts.append(read.total)
    assert sum(counts) == divided + 2 * everybodys
    assert max(counts) <= everybodys + 0.51 * divided


class Reading:
    """Counts the bytes that leave safetensors files."""

    def __init__(self) -> None:
        self.total = 0
        self._file: Any = None

    def open(self, path: Path, framework: str) -> Any:
        self._context = safe_open(path, framework=framework)
        return self

    def __enter__(self) -> Reading:
        self._file = self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._counted(self._file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        stored = self._file.get_slice(name)
        return Sliced(stored, self._counted)

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.total += tensor.nbytes
        return tensor


class Sliced:
    def __init__(self, stored: Any, counted: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._stored, self._counted = stored, counted
        self.get_shape = stored.get_shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._counted(self._stored[index])


def _shown(heads: range) -> str:
    return f"{heads.start}-{heads.stop - 1}"
