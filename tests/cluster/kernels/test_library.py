"""Building the kernels, and packed products against torch's."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import nn

from cluster.kernels.compile import Recipe, compile_library
from cluster.kernels.library import Library, open_library
from cluster.model.surgery import PackedModule

#: Relative to sums of about unit size: float32 in another order; bfloat16 with one rounding of the output.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def library() -> Library:
    library = open_library()
    assert library is not None, "no C++ compiler: the kernels cannot be tested here"
    return library


def linear(columns: int, depth: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(depth, columns, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 16, 17, 33, 70])
@pytest.mark.parametrize(("columns", "depth", "bias"), [(64, 32, False), (33, 50, True), (7, 3, True)])
def test_a_packed_product_is_the_product(
    library: Library, dtype: torch.dtype, rows: int, columns: int, depth: int, bias: bool
) -> None:
    plain = linear(columns, depth, bias, dtype)
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows)).to(dtype)
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    with torch.inference_mode():
        got = PackedModule(plain, library)(x)
        wide = PackedModule(plain, library, wide=True)(x)
    assert got.dtype == dtype
    assert wide.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(wide.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_is_bitwise_the_same_for_any_number_of_rows(library: Library, dtype: torch.dtype) -> None:
    packed = PackedModule(linear(96, 200, True, dtype), library)
    x = torch.randn(70, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        full = packed(x)
        for rows in (1, 2, 3, 5, 8, 16, 31, 64):
            assert torch.equal(packed(x[:rows]), full[:rows])


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NO_COMPILER", "1")
    assert open_library() is None
    monkeypatch.delenv("OUTRIDER_NO_COMPILER")
    monkeypatch.setenv("PATH", "")
    assert open_library() is None


def test_a_compiler_that_fails_costs_speed_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    assert open_library() is None


def _open(_: int) -> bool:
    return open_library() is not None


def test_concurrent_builders_leave_one_whole_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map_async(_open, range(2)).get(timeout=110) == [True, True]
    assert [path.suffix for path in (tmp_path / "outrider").iterdir()] == [".so"]


def test_a_compilation_is_announced_and_a_kept_library_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    news: list[str] = []
    for _ in range(2):
        assert compile_library("suffix", "suffix_nodes.h", "suffix_window.h", announce=lambda: news.append("built"))
    assert news == ["built"]


def test_what_is_kept_is_not_used_for_other_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for flags in (("-O1",), ("-O2",)):
        assert compile_library("suffix", "suffix_nodes.h", "suffix_window.h", recipe=Recipe(flags))
    assert len(list((tmp_path / "outrider").iterdir())) == 2
