"""Draws by the kernel against draws in plain torch, their truth (cluster/model/sample.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from cluster.kernels.noise import Noise, open_noise
from cluster.model.sample import Shape, draw, gumbel, noise_key

CPU = torch.device("cpu")
INF = float("inf")


@pytest.fixture(scope="module")
def noise() -> Noise:
    noise = open_noise()
    assert noise is not None, "no C++ compiler: the kernel cannot be tested here"
    return noise


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def warm(rows: int) -> Shape:
    return Shape((1.0,) * rows, (0,) * rows, (1.0,) * rows, (0.0,) * rows)


def keys(rows: int, seed: int = 0) -> list[int]:
    return [noise_key(seed, row) for row in range(rows)]


def logits(rows: int, vocab: int, scale: float, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# Flat laws let any token win, so every hash counts; steep ones leave most tokens out of the race.
@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("vocab", [1, 15, 16, 257, 8192, 8193, 49_152])
def test_the_kernel_draws_what_the_twin_draws(noise: Noise, vocab: int, scale: float) -> None:
    rows = 60
    x = logits(rows, vocab, scale)
    sums = x + gumbel(keys(rows), vocab, CPU)
    drawn = noise.draw(x, range(rows), keys(rows))
    # Where they part, both sums are within the rounding of either.
    behind = sums.max(dim=1).values - sums.gather(1, drawn[:, None])[:, 0]
    assert float(behind.max()) <= 1e-5
    assert int((drawn != sums.argmax(dim=1)).sum()) <= 1


def test_noise_is_the_twins_to_a_few_units_in_the_last_place(noise: Noise) -> None:
    """Two tokens in reach, their sums apart by little more than rounding: the right one must win."""
    rows = 50_000
    twin = gumbel(keys(rows), 2, CPU).double()
    largest = twin.abs().amax(dim=1).clamp(min=1.0)
    for sign, right in ((1.0, 1), (-1.0, 0)):
        apart = sign * 4 * 2.0**-23 * largest
        x = torch.stack([torch.zeros(rows).double(), twin[:, 0] - twin[:, 1] + apart], dim=1).float()
        assert bool((noise.draw(x, range(rows), keys(rows)) == right).all())


def test_a_row_is_drawn_alike_alone_in_a_batch_and_by_any_number_of_threads(noise: Noise, threads: None) -> None:
    x = logits(40, 20_000, 2.0)
    torch.set_num_threads(1)
    together = noise.draw(x, range(40), keys(40))
    torch.set_num_threads(4)
    assert torch.equal(noise.draw(x, range(40), keys(40)), together)
    for row in (0, 7, 39):
        assert noise.draw(x, [row], [keys(40)[row]]).item() == together[row]


def test_some_rows_of_a_wider_tensor(noise: Noise) -> None:
    wide = logits(9, 700, 1.0)
    part = wide[:, 100:500]
    expected = noise.draw(part.contiguous(), range(9), keys(9))
    assert torch.equal(noise.draw(part, [8, 2], [keys(9)[8], keys(9)[2]]), expected[[8, 2]])


def test_forbidden_tokens_never_win_and_infinite_ones_always_do(noise: Noise) -> None:
    x = torch.full((3, 9000), -INF)
    x[0, 8999] = -50.0
    x[1, [17, 8500]] = INF
    assert noise.draw(x, range(3), keys(3)).tolist() == [8999, 17, 0]  # as in torch, argmax of nothing is 0


@pytest.mark.parametrize("level", [1e8, -1e8])
def test_logits_so_large_that_noise_is_lost_in_rounding(noise: Noise, level: float) -> None:
    x = level + 8.0 * logits(20, 500, 1.0).round()
    expected = (x + gumbel(keys(20), 500, CPU)).argmax(dim=1)
    assert torch.equal(noise.draw(x, range(20), keys(20)), expected)


def test_draw_uses_the_kernel_for_rows_with_a_temperature_only(noise: Noise) -> None:
    x = logits(4, 300, 1.0)
    shape = Shape((0.0, 1.0, 0.0, 1.0), (0,) * 4, (1.0,) * 4, (0.0,) * 4)
    tokens = draw(x, shape, keys(4))
    assert torch.equal(tokens, draw(x, shape, keys(4), kernels=False))
    assert torch.equal(tokens[[0, 2]], x[[0, 2]].argmax(dim=1))
    assert torch.equal(tokens[[1, 3]], noise.draw(x, [1, 3], [keys(4)[1], keys(4)[3]]))


def test_frequencies_are_those_of_the_law(noise: Noise) -> None:
    law = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = 40_000
    drawn = noise.draw(law.log().expand(rows, 4), range(rows), keys(rows, seed=3))
    shares = torch.bincount(drawn, minlength=4) / rows
    for share, p in zip(shares.tolist(), law.tolist(), strict=True):
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / rows)
