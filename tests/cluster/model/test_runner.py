"""The runner's logits are those of the modelling code, however the tokens are cut into steps.

The truth is a plain forward of transformers over the whole sequence, in float32.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch

from cluster.errors import BrokenInvariant, ModelUnsupported
from cluster.kernels.library import open_library
from cluster.kv.store import Arena
from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.load import LoadedModel, load_model, locate
from cluster.model.torch_runner import TorchRunner, arena_for
from tests.tiny import FAMILIES, make_tiny

CPU = torch.device("cpu")
TOLERANCE = 2e-4  # float32, over sums taken in another order
BLOCK = 4
LENGTH = 30


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("llama"), "llama")


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(locate(str(path)), dtype=dtype, device=CPU)


def runner_of(loaded: LoadedModel, kernels: bool = True) -> TorchRunner:
    """A runner over a copy: it takes its module apart."""
    own = LoadedModel(copy.deepcopy(loaded.module), loaded.info)
    arena = arena_for(loaded.info, 64, block_tokens=BLOCK)
    for block in range(arena.num_blocks):
        arena.block(block).view(arena.dtype).fill_(float("nan"))  # nothing unwritten may be read
    return TorchRunner(own, arena, kernels=kernels)


def sequence(length: int, vocab: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def truth(loaded: LoadedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = loaded.module(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def table(which: int, length: int = LENGTH + 4) -> tuple[int, ...]:
    """Scattered blocks of the which-th sequence; no two share one."""
    need = -(-length // BLOCK)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5)).tolist()
    return tuple(order[which * need : (which + 1) * need])


def row(tokens: tuple[int, ...], first: int, end: int, which: int = 0, wants: int | None = None) -> PlanRow:
    wanted = end - first if wants is None else wants
    return PlanRow(which, first, tokens[first:end], table(which), wants=wanted)


def launch(runner: TorchRunner, *rows: PlanRow) -> torch.Tensor:
    return runner.launch(Plan(0, rows, Knobs())).logits_NV


@pytest.mark.parametrize("kernels", [True, False])
def test_chunks_steps_and_whole_prompts_give_the_logits_of_the_modelling_code(
    loaded: LoadedModel, kernels: bool
) -> None:
    tokens = sequence(LENGTH, loaded.info.vocab_size)
    expected = truth(loaded, tokens)
    runner = runner_of(loaded, kernels)
    whole = launch(runner, row(tokens, 0, LENGTH))
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)
    cuts = [0, 7, 8, 19, 26, 27, 28, 29, LENGTH]
    pieces = [launch(runner, row(tokens, a, b, which=1)) for a, b in itertools.pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces), expected, atol=TOLERANCE, rtol=0)


def test_rows_of_all_kinds_share_a_step(loaded: LoadedModel) -> None:
    vocab = loaded.info.vocab_size
    tokens = [sequence(LENGTH, vocab, seed) for seed in range(4)]
    expected = [truth(loaded, each) for each in tokens]
    runner = runner_of(loaded)
    launch(
        runner, row(tokens[0], 0, 29, 0, wants=0), row(tokens[1], 0, 11, 1, wants=0), row(tokens[3], 0, 25, 3, wants=0)
    )
    got = launch(
        runner,
        row(tokens[0], 29, 30, 0),
        row(tokens[1], 11, 20, 1, wants=0),
        row(tokens[2], 0, 16, 2, wants=1),
        row(tokens[3], 25, 30, 3),
    )
    wanted = torch.cat([expected[0][29:30], expected[2][15:16], expected[3][25:30]])
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


def test_rejected_drafts_leave_no_trace(loaded: LoadedModel) -> None:
    vocab = loaded.info.vocab_size
    tokens = sequence(LENGTH, vocab)
    liar = tokens[:20] + tuple((token + 1) % vocab for token in tokens[20:])
    runner = runner_of(loaded)
    launch(runner, row(tokens, 0, 19, wants=0))
    verified = launch(runner, row(liar, 19, 26))
    torch.testing.assert_close(verified, truth(loaded, liar)[19:26], atol=TOLERANCE, rtol=0)
    after = launch(runner, row(tokens, 20, 24))
    torch.testing.assert_close(after, truth(loaded, tokens)[20:24], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_bitwise_the_same_alone_in_a_batch_and_drafted(llama: Path, dtype: torch.dtype) -> None:
    if open_library() is None:
        pytest.fail("no C++ compiler: the kernels cannot be tested here")
    loaded = load(llama, dtype)
    vocab = loaded.info.vocab_size
    tokens = [sequence(LENGTH, vocab, seed) for seed in range(3)]
    runner = runner_of(loaded)
    launch(runner, *(row(each, 0, 20, which, wants=0) for which, each in enumerate(tokens)))
    together = launch(runner, *(row(each, 20, 28, which) for which, each in enumerate(tokens)))
    alone = torch.cat([launch(runner, row(tokens[1], at, at + 1, 1)) for at in range(20, 28)])
    assert torch.equal(together[8:16], alone)


def test_bfloat16_is_no_further_from_float32_than_the_modelling_code_in_bfloat16(llama: Path) -> None:
    exact, rounded = load(llama), load(llama, torch.bfloat16)
    tokens = sequence(LENGTH, exact.info.vocab_size)
    expected = truth(exact, tokens)
    ours = (launch(runner_of(rounded), row(tokens, 0, LENGTH)) - expected).abs().mean()
    theirs = (truth(rounded, tokens).float() - expected).abs().mean()
    assert ours <= 1.1 * theirs


def test_a_step_without_wanted_logits_and_an_empty_step(loaded: LoadedModel) -> None:
    runner = runner_of(loaded)
    tokens = sequence(LENGTH, loaded.info.vocab_size)
    assert launch(runner, row(tokens, 0, 5, wants=0)).shape == (0, runner.vocab_size)
    assert launch(runner).shape == (0, runner.vocab_size)


def test_broken_plans_are_refused(llama: Path) -> None:
    loaded = load(llama)
    runner = runner_of(loaded)
    for broken, reason in [
        (PlanRow(0, 0, (loaded.info.vocab_size,), (0,)), "token id"),
        (PlanRow(0, 0, (-1,), (0,)), "token id"),
        (PlanRow(0, 0, (1,), (64,)), "block table"),
        (PlanRow(0, BLOCK, (1,), (0,)), "do not cover"),
        (PlanRow(0, 0, (1,), (0,), wants=2), "logits wanted"),
    ]:
        with pytest.raises(BrokenInvariant, match=reason):
            launch(runner, broken)


def test_an_arena_of_another_shape_is_refused(llama: Path) -> None:
    loaded = load(llama)
    with pytest.raises(ModelUnsupported, match="kv heads"):
        TorchRunner(loaded, Arena(4, num_layers=3, num_kv_heads=3, head_dim=16, dtype=torch.float32))


def test_a_packed_layer_that_computes_something_else_is_refused(llama: Path) -> None:
    loaded = load(llama)
    # The module says SiLU by type but does not compute it: only running it can tell.
    mlp = loaded.module.model.layers[1].mlp
    mlp.act_fn.forward = torch.relu
    with pytest.raises(ModelUnsupported, match=r"layer 1.*off by"):
        TorchRunner(loaded, arena_for(loaded.info, 4))
