"""Weights in 8 and 4 bits: the kernels compute what the rounded weights say, close to the originals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cluster.model.load import load_model, locate
from cluster.model.quantize import Bits, Int4Linear, Int8Linear, quantize_linears

CPU = torch.device("cpu")


def linear(rows: int, columns: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(rows * columns)
    return nn.Linear(columns, rows, bias=bias).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "steps"), [(Int8Linear, 254), (Int4Linear, 15)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_the_error_is_half_a_step(
    kind: type[Int8Linear | Int4Linear], steps: int, dtype: torch.dtype, bias: bool
) -> None:
    """Read off the kernel itself: the rows of an identity are the weights it multiplies by."""
    original = linear(48, 64, dtype, bias=bias)
    made = kind(original)
    zero = made(torch.zeros(1, 64, dtype=dtype))
    weight = (made(torch.eye(64, dtype=dtype)) - zero).T.float()
    exact = original.weight.float()
    spread = exact.amax() - exact.amin()
    rounding = 0.0 if dtype == torch.float32 else 0.02 * float(exact.abs().amax())
    assert float((weight - exact).abs().max()) <= 0.55 * float(spread) / steps + rounding
    assert torch.allclose(zero[0], original.bias if bias else torch.zeros(48, dtype=dtype), atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 9, 70])
@torch.no_grad()
def test_any_number_of_rows_and_any_leading_shape(rows: int) -> None:
    original = linear(32, 96, torch.float32)
    for made in (Int8Linear(original), Int4Linear(original)):
        x = torch.randn(1, rows, 96)
        together = made(x)
        assert together.shape == (1, rows, 32)
        alone = torch.cat([made(x[:, row : row + 1]) for row in range(rows)], dim=1)
        assert torch.allclose(together, alone, atol=1e-5)


@torch.no_grad()
def test_an_all_zero_row_stays_zero() -> None:
    original = linear(16, 32, torch.float32, bias=False)
    original.weight[3] = 0.0
    for made in (Int8Linear(original), Int4Linear(original)):
        assert float(made(torch.randn(4, 32))[:, 3].abs().max()) < 1e-6


@pytest.mark.parametrize(("bits", "kinds"), [(8, {8}), (4, {4, 8})])
def test_a_model_is_replaced_whole_and_its_originals_released(tiny_llama: Path, bits: Bits, kinds: set[int]) -> None:
    module = load_model(locate(str(tiny_llama)), dtype=torch.float32, device=CPU).module
    before = sum(parameter.nbytes for parameter in module.parameters())
    quantize_linears(module, bits)
    found = [part for part in module.modules() if isinstance(part, Int8Linear | Int4Linear)]
    assert len(found) == 3 * 7 + 1
    assert {part.bits for part in found} == kinds
    assert not any(type(part) is nn.Linear for part in module.modules())
    embedding = module.model.embed_tokens.weight.nbytes
    left = sum(parameter.nbytes for parameter in module.parameters())
    assert left < before / 3
    assert left >= embedding
