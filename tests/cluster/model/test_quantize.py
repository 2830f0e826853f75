"""Weights in 8 and 4 bits: close to the originals, and computed with exactly as they are written."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cluster.kernels.library import Library, open_library
from cluster.messages import Knobs, Plan, PlanRow
from cluster.model.files import ModelFiles
from cluster.model.load import load_model, locate
from cluster.model.quantize import Bits, quantize_linears, round_weight, rounded_of
from cluster.model.surgery import PackedModule
from cluster.model.torch_runner import TorchRunner, arena_for

CPU = torch.device("cpu")
STEPS: dict[Bits, int] = {8: 254, 4: 15}


@pytest.fixture(scope="module")
def library() -> Library:
    library = open_library()
    assert library is not None, "no C++ compiler: the kernels cannot be tested here"
    return library


def linear(rows: int, columns: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(rows * columns)
    return nn.Linear(columns, rows, bias=bias).to(dtype).requires_grad_(False)


def rounded(original: nn.Linear, bits: Bits) -> nn.Linear:
    made = copy.deepcopy(original)
    made.rounded = round_weight(made.weight, bits)  # type: ignore[assignment]
    made.weight.data = rounded_of(made).weight(made.in_features, made.weight.dtype)  # type: ignore[union-attr]
    return made


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 100), st.floats(1e-3, 1e3), st.floats(-2.0, 2.0), st.integers(0, 99))
def test_the_error_is_half_a_step(bits: Bits, rows: int, columns: int, size: float, shift: float, seed: int) -> None:
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + shift) * size
    again = round_weight(weight, bits).weight(columns, torch.float32)
    for start in range(0, columns, 32):
        group, back = weight[:, start : start + 32], again[:, start : start + 32]
        if bits == 8:
            span = 2 * group.abs().amax(dim=1, keepdim=True)
        else:
            span = group.amax(dim=1, keepdim=True) - group.amin(dim=1, keepdim=True)
        # Scale and offset are themselves rounded, to 11 bits.
        half = group.abs().amax(dim=1, keepdim=True) * 2**-10 + 1e-4
        assert bool(((back - group).abs() <= 0.5 * span / STEPS[bits] + half).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_what_was_rounded_so_before_is_rounded_to_itself(bits: Bits) -> None:
    """As weights from a file of such groups are: each group uses its lowest and its highest level."""
    generator = torch.Generator().manual_seed(1)
    if bits == 8:
        levels = torch.randint(-127, 128, (6, 4, 32), generator=generator)
        levels[..., 5] = 127
        offset = torch.zeros(6, 4, 1)
    else:
        levels = torch.randint(0, 16, (6, 4, 32), generator=generator)
        levels[..., 5], levels[..., 9] = 0, 15
        offset = torch.randn(6, 4, 1, generator=generator).half().float()
    scale = torch.rand(6, 4, 1, generator=generator).half().float()
    weight = (levels * scale + offset).flatten(1)
    assert torch.equal(round_weight(weight, bits).weight(128, torch.float32), weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_of_one_value_stay_what_they_are(bits: Bits) -> None:
    weight = torch.zeros(4, 64)
    weight[1] = 0.5
    again = round_weight(weight, bits).weight(64, torch.float32)
    assert not again[[0, 2, 3]].any()
    assert torch.allclose(again[1], weight[1], rtol=2**-11)


def product(x_MK: torch.Tensor, made: nn.Linear) -> torch.Tensor:
    """The twin of kernels/levels.h: rows rounded to 8 bits in groups of 32, each group's products summed exactly."""
    levels = rounded_of(made)
    assert levels is not None
    padded_MK = nn.functional.pad(x_MK.double(), (0, -x_MK.shape[1] % 32))
    rows_MGK = padded_MK.unflatten(1, (-1, 32))
    most_MG1 = rows_MGK.abs().amax(dim=2, keepdim=True)
    rounded_MGK = (rows_MGK * torch.where(most_MG1 > 0, 127 / most_MG1, 0.0)).round() * most_MG1 / 127
    weight_NGK = levels.levels_NK.double().unflatten(1, (-1, 32)) * levels.scale_NG.double()[..., None]
    weight_NGK += levels.offset_NG.double()[..., None]
    bias = made.bias.double() if made.bias is not None else 0.0
    return torch.einsum("mgk,ngk->mn", rounded_MGK, weight_NGK) + bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 17, 33, 70])
@pytest.mark.parametrize(
    ("columns", "depth", "bias"), [(64, 32, False), (33, 50, True), (7, 3, True), (96, 700, False)]
)
def test_the_kernel_computes_what_its_twin_does(
    library: Library, dtype: torch.dtype, bits: Bits, rows: int, columns: int, depth: int, bias: bool
) -> None:
    made = rounded(linear(columns, depth, dtype, bias=bias), bits)
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows)).to(dtype)
    with torch.inference_mode():
        got = PackedModule(made, library, wide=True)(x).double()
    exact = product(x, made)
    # An activation exactly between two levels may go either way in float32.
    assert float((got - exact).norm() / exact.norm()) < 3e-3
    whole = nn.functional.linear(x.double(), made.weight.double(), made.bias.double() if bias else None)
    assert float((got - whole).norm() / whole.norm()) < 0.015


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_bitwise_the_same_for_any_number_of_rows(library: Library, bits: Bits) -> None:
    """Few rows are multiplied one by one, more in tiles."""
    packed = PackedModule(rounded(linear(96, 200, torch.bfloat16), bits), library, wide=True)
    x = torch.randn(70, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        full = packed(x)
        for rows in (1, 2, 5, 6, 7, 16, 17, 32, 33, 64):
            assert torch.equal(packed(x[:rows]), full[:rows])


def test_rows_of_zeros_stay_zeros(library: Library) -> None:
    for bits in STEPS:
        packed = PackedModule(rounded(linear(32, 64, torch.float32, bias=False), bits), library)
        assert not packed(torch.zeros(2, 64)).any()


def test_fewer_bits_are_fewer_bytes(library: Library) -> None:
    original = linear(64, 256, torch.bfloat16)
    sizes = {bits: PackedModule(rounded(original, bits), library).nbytes for bits in STEPS}
    assert sizes[8] == 64 * 256 + 64 * 8 * 4
    assert sizes[4] == 64 * 256 // 2 + 64 * 8 * 4
    assert PackedModule(original, library).nbytes == 2 * 64 * 256


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_few_bits_runs_as_its_rounded_weights_do(tiny_llama: Path, bits: Bits, dtype: torch.dtype) -> None:
    """The fused kernels over levels against plain torch over the numbers they stand for; the embedding untouched."""
    loaded, twin = (load_model(locate(str(tiny_llama)), dtype=dtype, device=CPU) for _ in range(2))
    embedding = loaded.module.model.embed_tokens.weight.clone()
    for each in (loaded, twin):
        quantize_linears(each.module, bits)
    assert torch.equal(loaded.module.model.embed_tokens.weight, embedding)
    layers = [part for part in twin.module.modules() if type(part) is nn.Linear]
    assert len(layers) == 3 * 7 + 1
    assert {levels.bits for part in layers if (levels := rounded_of(part))} == {8, bits}
    rows = (PlanRow(0, 0, tuple(range(1, 40)), (0, 1), wants=39), PlanRow(1, 0, (5,), (2,), wants=1))
    plan = Plan(1, rows, Knobs())
    runners = TorchRunner(loaded, arena_for(loaded.info, 4)), TorchRunner(twin, arena_for(twin.info, 4), kernels=False)
    got, exact = (runner.launch(plan).logits_NV for runner in runners)
    assert float((got - exact).norm() / exact.norm()) < 0.08


def test_the_embedded_model_loses_nothing_in_the_bits_it_came_in(smollm2: ModelFiles) -> None:
    """Its file holds groups of 32 in 4 bits (Q4_1) and in 8 (Q8_0): layers are rounded to what they were."""
    module = load_model(smollm2, dtype=torch.float32, device=CPU, layers=(0, 17, 29)).module
    for name, part in module.model.layers.named_modules():
        if type(part) is nn.Linear:
            again = [round_weight(part.weight, bits).weight(part.in_features, torch.float32) for bits in STEPS]
            assert any(torch.equal(weight, part.weight) for weight in again), name
