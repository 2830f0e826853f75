"""The C++ attention kernel against its plain twin, and the bridge that transformers calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

from cluster.errors import ModelUnsupported
from cluster.kernels.library import open_library
from cluster.kv.store import Arena
from cluster.messages import PlanRow
from cluster.model.attention import PlainBackend, Ragged, Variant
from cluster.model.attention.bridge import PagedCache, paged_attention
from cluster.model.attention.cpu import CpuBackend

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}  # the second: one rounding of the output
BLOCKS = 64
SHAPES = [(9, 3, 64), (4, 4, 16), (8, 2, 80), (8, 1, 33), (4, 2, 256), (40, 1, 8), (2, 2, 300)]
#: (first position, tokens): a first token, a prompt, a chunk further on, a decode step.
ROWS = [(0, 1), (0, 37), (50, 5), (99, 1)]


def scene(
    shape: tuple[int, int, int], dtype: torch.dtype, block_tokens: int, spots: Sequence[tuple[int, int]] = ROWS
) -> tuple[Arena, list[PlanRow], torch.Tensor]:
    """An arena of NaN where only the rows' own past is written, the rows and their queries."""
    generator = torch.Generator().manual_seed(7)
    query_heads, heads, dim = shape
    arena = Arena(BLOCKS, num_layers=2, num_kv_heads=heads, head_dim=dim, dtype=dtype, block_tokens=block_tokens)
    for block in range(BLOCKS):
        arena.block(block).view(dtype).fill_(float("nan"))
    order = torch.randperm(BLOCKS, generator=generator).tolist()
    rows = []
    for sequence, (first, count) in enumerate(spots):
        blocks = tuple(order.pop() for _ in range(-(-(first + count) // block_tokens)))
        rows.append(PlanRow(sequence, first, (0,) * count, blocks))
    past = ragged([PlanRow(row.sequence, 0, (0,) * row.end, row.blocks) for row in rows], block_tokens)
    keys, values = (torch.randn(past.num_tokens, heads, dim, generator=generator).to(dtype) for _ in range(2))
    PlainBackend().write(arena, 1, past, keys, values)
    count = sum(len(row.tokens) for row in rows)
    return arena, rows, torch.randn(count, query_heads, dim, generator=generator).to(dtype)


def ragged(rows: list[PlanRow], block_tokens: int) -> Ragged:
    return Ragged.of(rows, block_tokens=block_tokens, num_blocks=BLOCKS)


@pytest.fixture(scope="module")
def kernel() -> CpuBackend:
    library = open_library()
    assert library is not None, "no C++ compiler: the kernels cannot be tested here"
    return CpuBackend(library)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (7, None, True), (40, 5.0, False)])
@pytest.mark.parametrize("block_tokens", [32, 5])
def test_the_kernel_computes_what_its_twin_computes(
    kernel: CpuBackend,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    block_tokens: int,
) -> None:
    arena, rows, queries = scene(shape, dtype, block_tokens)
    variant = Variant(shape[2] ** -0.5, window, softcap, torch.linspace(-1, 1, shape[0]) if sinks else None)
    step = ragged(rows, block_tokens)
    got = kernel.attend(arena, 1, step, queries, variant)
    expected = PlainBackend().attend(arena, 1, step, queries, variant)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 7])
def test_a_row_is_bitwise_the_same_without_its_neighbours(
    kernel: CpuBackend, dtype: torch.dtype, window: int | None
) -> None:
    arena, rows, queries = scene((9, 3, 64), dtype, 32)
    variant = Variant(0.125, window)
    together = kernel.attend(arena, 1, ragged(rows, 32), queries, variant)
    at = 0
    for row in rows:
        for offset in range(len(row.tokens)):  # token by token, as plain decoding would
            single = PlanRow(row.sequence, row.first + offset, (0,), row.blocks)
            alone = kernel.attend(arena, 1, ragged([single], 32), queries[at : at + 1], variant)
            assert torch.equal(alone[0], together[at])
            at += 1


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


#: Past one span of the kernel (256 positions): long rows beside short ones, chunks across its edge.
LONG = [(700, 1), (250, 12), (3, 2), (511, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (None, True), (300, False), (40, True)])
@pytest.mark.parametrize("block_tokens", [32, 48])
def test_long_rows_are_split_without_a_trace(
    kernel: CpuBackend, threads: None, dtype: torch.dtype, window: int | None, sinks: bool, block_tokens: int
) -> None:
    arena, rows, queries = scene((9, 3, 64), dtype, block_tokens, LONG)
    variant = Variant(0.125, window, None, torch.linspace(-1, 1, 9) if sinks else None)
    step = ragged(rows, block_tokens)
    got = kernel.attend(arena, 1, step, queries, variant)
    expected = PlainBackend().attend(arena, 1, step, queries, variant)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=0)
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 3)
    assert torch.equal(kernel.attend(arena, 1, step, queries, variant), got)
    for at, row in [(0, rows[0]), (15, rows[3])]:
        one = PlanRow(row.sequence, row.first, (0,), row.blocks)
        alone = kernel.attend(arena, 1, ragged([one], block_tokens), queries[at : at + 1], variant)
        assert torch.equal(alone[0], got[at])
        # So many rows that each is computed in one piece.
        crowd = kernel.attend(
            arena, 1, ragged([one] * 120, block_tokens), queries[at : at + 1].repeat(120, 1, 1), variant
        )
        assert torch.equal(crowd, got[at].expand(120, -1, -1))


@pytest.mark.parametrize("window", [None, 6])
def test_the_twin_is_scaled_dot_product_attention(window: int | None) -> None:
    arena, rows, queries = scene((4, 2, 16), torch.float32, 32)
    got = PlainBackend().attend(arena, 1, ragged(rows[1:2], 32), queries[1:38], Variant(0.25, window))
    blocks = torch.tensor(rows[1].blocks)
    keys, values = (
        pages[blocks].transpose(0, 1).reshape(2, -1, 16)[:, :37].repeat_interleave(2, dim=0)
        for pages in (arena.keys(1), arena.values(1))
    )
    visible = torch.ones(37, 37, dtype=torch.bool).tril()
    if window is not None:
        visible &= torch.ones(37, 37, dtype=torch.bool).triu(1 - window)
    expected = nn.functional.scaled_dot_product_attention(
        queries[1:38].transpose(0, 1), keys, values, visible, scale=0.25
    )
    torch.testing.assert_close(got, expected.transpose(0, 1), atol=2e-6, rtol=0)


def test_keywords_that_would_have_to_be_ignored_are_refused() -> None:
    arena, rows, queries = scene((4, 2, 16), torch.float32, 32)
    module = nn.Identity()
    module.layer_idx = 1  # type: ignore[assignment]
    cache = PagedCache(arena, PlainBackend(), ragged(rows, 32))
    flat = queries.transpose(0, 1)[None]

    def call(**extra: object) -> None:
        paged_attention(module, flat, flat, flat, None, 0.25, paged_cache=cache, **extra)  # type: ignore[arg-type]

    call(position_ids=torch.arange(3), use_cache=False, some_option=None)
    with pytest.raises(ModelUnsupported, match="position_bias"):
        call(position_bias=torch.zeros(1))
    with pytest.raises(ModelUnsupported, match="dropout"):
        call(dropout=0.1)
