"""Trees in one pass: the kernel against its twin, each path against itself as a chain, paths laid straight."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import BrokenInvariant
from cluster.kernels.library import open_library
from cluster.kv.store import Arena
from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.attention import PlainBackend, Ragged, Variant
from cluster.model.attention.cpu import CpuBackend
from cluster.model.load import LoadedModel, load_model, locate
from cluster.tree import LARGEST, paths
from tests.cluster.model.test_attention import BLOCKS, TOLERANCE, scene
from tests.cluster.model.test_runner import launch, runner_of, sequence, table
from tests.tiny import FAMILIES, make_tiny

PAST = 12  # tokens before the tree: beyond the windows of the tiny families
LOGITS = 2e-4  # float32, over sums taken in another order


def any_tree(size: int, rng: random.Random, bushy: int) -> tuple[int, ...]:
    return tuple(rng.randrange(max(-1, node - bushy), node) for node in range(size))


@pytest.fixture(scope="module")
def kernel() -> CpuBackend:
    library = open_library()
    assert library is not None, "no C++ compiler: the kernels cannot be tested here"
    return CpuBackend(library)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (3, None, True), (40, 5.0, False)])
@pytest.mark.parametrize("block_tokens", [32, 5])
def test_the_kernel_computes_what_its_twin_computes_on_trees(
    kernel: CpuBackend,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    block_tokens: int,
) -> None:
    rng = random.Random(block_tokens)
    variant = Variant(0.125, window, softcap, torch.linspace(-1, 1, 9) if sinks else None)
    for size in (1, 2, 7, 20, LARGEST):
        # A tree after its token, one whose last nodes alone are computed and a chain; a tree across spans of 256.
        several = [(30, 1 + size), (40 + size // 2, size - size // 2), (50, 5)]
        trees = [any_tree(size, rng, 1 + size // 3), any_tree(size, rng, 3), None]
        for spots, parents in ((several, trees), ([(250, 2 + size)], [any_tree(size, rng, size)])):
            check(kernel, scene((9, 3, 64), dtype, block_tokens, spots), parents, block_tokens, variant)


def check(
    kernel: CpuBackend,
    made: tuple[Arena, list[PlanRow], torch.Tensor],
    trees: Sequence[tuple[int, ...] | None],
    block_tokens: int,
    variant: Variant,
) -> None:
    arena, rows, queries = made
    held = [replace(row, parents=tree) for row, tree in zip(rows, trees, strict=True)]
    step = Ragged.of(held, block_tokens=block_tokens, num_blocks=BLOCKS)
    got = kernel.attend(arena, 1, step, queries, variant)
    expected = PlainBackend().attend(arena, 1, step, queries, variant)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[arena.dtype], rtol=0)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_tiny(tmp_path_factory.mktemp(request.param), request.param)
    return load_model(locate(str(path)), dtype=torch.float32, device=torch.device("cpu"))


def as_chain(loaded: LoadedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = loaded.module(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("kernels", [True, False])
def test_each_path_of_a_tree_gives_the_logits_of_that_path_and_laid_straight_is_built_upon(
    loaded: LoadedModel, kernels: bool
) -> None:
    rng = random.Random(3)
    vocab = loaded.info.vocab_size
    tokens, other = sequence(PAST, vocab), sequence(20, vocab, 1)
    parents = (*any_tree(11, rng, 4), 3, 11, 12, 13)  # and one long path, past the windows
    nodes = sequence(len(parents), vocab, 2)
    runner = runner_of(loaded, kernels)
    launch(runner, PlanRow(0, 0, tokens[:-1], table(0)), PlanRow(1, 0, other, table(1)))
    tree = PlanRow(0, PAST - 1, (tokens[-1], *nodes), table(0), len(nodes), len(nodes) + 1, parents=parents)
    got = launch(runner, tree, PlanRow(1, 20, (5,), table(1), wants=1))
    branches = [(), *paths(nodes, parents)]
    for slot, path in enumerate(branches):
        torch.testing.assert_close(got[slot], as_chain(loaded, tokens + path)[-1], atol=LOGITS, rtol=0)

    leaf = max(range(len(nodes)), key=lambda node: len(branches[node + 1]))
    path = [leaf]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    size = 4

    def slot_of(place: int) -> int:
        return table(0)[place // size] * size + place % size

    moves = tuple((slot_of(PAST + node), slot_of(PAST + at)) for at, node in enumerate(path))
    known = tokens + branches[leaf + 1]
    onward = (*known, *other[:3])
    row = PlanRow(0, len(known), other[:3], table(0), wants=3)
    straight = runner.launch(Plan(0, (row,), Knobs(), moves)).logits_NV
    torch.testing.assert_close(straight, as_chain(loaded, onward)[-3:], atol=LOGITS, rtol=0)


def test_a_tree_level_by_level_gives_the_same(tmp_path: Path) -> None:
    loaded = load_model(locate(str(make_tiny(tmp_path))), dtype=torch.float32, device=torch.device("cpu"))
    tokens = sequence(PAST, loaded.info.vocab_size)
    nodes, parents = sequence(6, loaded.info.vocab_size, 2), (-1, -1, 0, 1, 1, 2)
    runner = runner_of(loaded)
    launch(runner, PlanRow(0, 0, tokens, table(0)))
    found = []
    for first, end in ((0, 2), (2, 5), (5, 6)):
        level = PlanRow(0, PAST + first, nodes[first:end], table(0), wants=end - first, parents=parents[:end])
        found.append(launch(runner, level))
    for got, path in zip(torch.cat(found), paths(nodes, parents), strict=True):
        torch.testing.assert_close(got, as_chain(loaded, tokens + path)[-1], atol=LOGITS, rtol=0)


def test_trees_no_kernel_could_describe_are_refused(tmp_path: Path) -> None:
    loaded = load_model(locate(str(make_tiny(tmp_path))), dtype=torch.float32, device=torch.device("cpu"))
    runner = runner_of(loaded)
    many = LARGEST + 1
    for broken in (
        PlanRow(0, 4, (1,) * many, tuple(range(32)), parents=(-1,) * many),
        PlanRow(0, 0, (1, 2), (0,), parents=(-1, 0)),
    ):
        with pytest.raises(BrokenInvariant, match="a tree of"):
            launch(runner, broken)
