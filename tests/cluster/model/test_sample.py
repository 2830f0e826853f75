"""Laws over the vocabulary and keyed noise."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, gumbel_r, kstest, pearsonr

from cluster.model.sample import Shape, draw, gumbel, noise_key, probabilities, shape_logits, uniform
from cluster.request import Sampling

CPU = torch.device("cpu")
LEAST_P = 1e-4


def law(logits: list[float], **fields: float) -> list[float]:
    """The law of one position."""
    shape = Shape.of([Sampling(**fields)])  # type: ignore[arg-type]
    return probabilities(shape_logits(torch.tensor([logits]), shape), shape)[0].tolist()


def log(*probs: float) -> list[float]:
    return [math.log(p) for p in probs]


# ---- noise ----


def test_uniform_is_uniform_and_open() -> None:
    draws = [uniform(noise_key(seed, 5)) for seed in range(20_000)]
    assert kstest(draws, "uniform").pvalue > LEAST_P
    assert 0.0 < min(draws) < max(draws) < 1.0


def test_the_largest_uniform_is_below_one() -> None:
    """Found here: with 53 bits and a half the top value rounded to exactly 1."""
    assert ((2**52 - 1) + 0.5) * 2.0**-52 < 1.0
    assert ((2**53 - 1) + 0.5) * 2.0**-53 == 1.0


@pytest.mark.parametrize("counters", [(0,), (1, 2), (7, 1, 3)])
def test_gumbel_noise_is_gumbel_across_keys_and_tokens(counters: tuple[int, ...]) -> None:
    noise = gumbel([noise_key(seed, *counters) for seed in range(200)], 500, CPU)
    assert kstest(noise.flatten().numpy(), gumbel_r.cdf).pvalue > LEAST_P
    assert kstest(noise[:, 0].numpy(), gumbel_r.cdf).pvalue > LEAST_P
    assert kstest(noise[0].numpy(), gumbel_r.cdf).pvalue > LEAST_P
    assert torch.isfinite(noise).all()


def test_the_tail_of_the_noise_is_there() -> None:
    """Rare tokens win only by large noise: P(noise > x) = exp(-x) nearly, far out."""
    noise = gumbel([noise_key(seed) for seed in range(40)], 100_000, CPU)
    for x in (8.0, 10.0, 11.0):
        due = noise.numel() * -math.expm1(-math.exp(-x))
        assert abs(int((noise > x).sum()) - due) < 5 * math.sqrt(due)


@pytest.mark.parametrize("other", ["next seed", "next position", "other stream", "next token"])
def test_neighbouring_keys_are_independent(other: str) -> None:
    base = gumbel([noise_key(seed, 10, 1) for seed in range(20_000)], 2, CPU)
    twin = {
        "next seed": lambda: gumbel([noise_key(seed + 1, 10, 1) for seed in range(20_000)], 1, CPU)[:, 0],
        "next position": lambda: gumbel([noise_key(seed, 11, 1) for seed in range(20_000)], 1, CPU)[:, 0],
        "other stream": lambda: gumbel([noise_key(seed, 10, 2) for seed in range(20_000)], 1, CPU)[:, 0],
        "next token": lambda: base[:, 1],
    }[other]()
    assert pearsonr(base[:, 0].exp().reciprocal(), twin.exp().reciprocal()).pvalue > LEAST_P


def test_keys_of_seeds_positions_and_streams_do_not_collide() -> None:
    keys = [noise_key(seed, position) for seed in range(50) for position in range(50)]
    keys += [noise_key(seed, position, stream) for seed in range(50) for position in range(50) for stream in (1, 2)]
    assert len(set(keys)) == len(keys)
    assert noise_key(1, 2) != noise_key(2, 1)
    assert all(0 <= key < 2**64 for key in keys)
    assert noise_key(2**63 - 1, 2**40) >= 0


def test_noise_is_the_same_alone_and_in_a_batch() -> None:
    keys = [noise_key(seed, 3) for seed in range(9)]
    together = gumbel(keys, 333, CPU)
    for row, key in enumerate(keys):
        assert torch.equal(gumbel([key], 333, CPU)[0], together[row])
    assert torch.equal(gumbel(keys, 100, CPU), together[:, :100])


# ---- laws ----


def test_temperature_scales_logits() -> None:
    assert law(log(0.2, 0.8), temperature=0.5) == pytest.approx([0.04 / 0.68, 0.64 / 0.68], abs=1e-6)
    assert law(log(0.2, 0.8), temperature=1.0) == pytest.approx([0.2, 0.8], abs=1e-6)


def test_temperature_zero_is_the_argmax_whatever_cuts() -> None:
    assert law([1.0, 3.0, 3.0, 0.0], temperature=0.0, top_k=1, top_p=0.1, min_p=1.0) == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("logits", [[-1000.0, 5000.0, 4999.0], [0.0, 1e-3, 0.0], [-3.0, -1.0, -2.0]])
def test_the_coldest_temperatures_are_the_argmax(temperature: float, logits: list[float]) -> None:
    """Found here: they divided to inf and NaN, and the draw was token 0."""
    assert law(logits, temperature=temperature) == pytest.approx([0.0, 1.0, 0.0], abs=1e-3)


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-10, 0.39])
def test_the_smallest_top_p_keeps_the_likeliest(top_p: float) -> None:
    """Found here: a top_p below float32's range dropped every token."""
    assert law(log(0.3, 0.4, 0.3), top_p=top_p) == pytest.approx([0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.45}, [0]),
        ({"top_p": 0.55}, [0, 1]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"min_p": 0.5}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.6}, [0, 1]),  # top-p counts what top-k left, renormalised
        ({"top_p": 0.85, "min_p": 0.5}, [0, 1]),
    ],
)
def test_cuts_keep_and_renormalise(fields: dict[str, float], kept: list[int]) -> None:
    probs = [0.5, 0.26, 0.14, 0.1]
    total = sum(probs[token] for token in kept)
    expected = [p / total if token in kept else 0.0 for token, p in enumerate(probs)]
    assert law(log(*probs), **fields) == pytest.approx(expected, abs=1e-6)


def test_ties_are_cut_to_size() -> None:
    assert sum(p > 0 for p in law([1.0] * 6, top_k=2)) == 2
    assert sum(p > 0 for p in law([1.0] * 4, top_p=0.5)) == 2
    assert sum(p > 0 for p in law([1.0] * 4, min_p=1.0)) == 4


def test_top_p_beyond_the_sorted_window() -> None:
    flat = law([0.0] * 5000, top_p=0.5)
    assert sum(p > 0 for p in flat) == pytest.approx(2500, abs=2)
    assert sum(flat) == pytest.approx(1.0)


def test_forbidden_tokens_stay_forbidden() -> None:
    assert law([-math.inf, 0.0, -math.inf], temperature=1e-5) == [0.0, 1.0, 0.0]
    assert law([-math.inf, 0.0, 0.0], top_p=0.99, min_p=0.1) == pytest.approx([0.0, 0.5, 0.5])


def test_a_row_is_shaped_the_same_in_any_company() -> None:
    rows = [
        Sampling(temperature=0.0, top_k=1),
        Sampling(),
        Sampling(temperature=0.7, top_k=3),
        Sampling(temperature=1e-5),
        Sampling(top_p=0.4, min_p=0.3),
    ]
    logits = torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(1))
    logits[0] = logits[0].round()  # with ties
    keys = [noise_key(seed) for seed in range(len(rows))]
    together = Shape.of(rows)
    tokens = draw(shape_logits(logits, together), together, keys)
    laws = probabilities(shape_logits(logits, together), together)
    for row, sampling in enumerate(rows):
        alone = Shape.of([sampling])
        shaped = shape_logits(logits[row : row + 1], alone)
        assert draw(shaped, alone, keys[row : row + 1])[0] == tokens[row]
        assert torch.equal(probabilities(shaped, alone)[0], laws[row])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_shaping_leaves_the_raw_logits_alone(temperature: float) -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    shape = Shape.of([Sampling(temperature=temperature, top_k=2, top_p=0.5, min_p=0.1), Sampling()])
    shaped = shape_logits(logits, shape)
    draw(shaped, shape, [1, 2])
    probabilities(shaped, shape)
    assert torch.equal(logits, before)


def test_draws_follow_the_law() -> None:
    probs = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    shape = Shape.of([Sampling()] * 20_000)
    shaped = shape_logits(torch.tensor(probs, dtype=torch.float32).log().expand(20_000, 5), shape)
    tokens = draw(shaped, shape, [noise_key(seed, 9) for seed in range(20_000)]).tolist()
    assert chisquare(np.bincount(tokens, minlength=5), probs * 20_000).pvalue > LEAST_P
    pairs = np.zeros((5, 5))
    for pair in pairwise(tokens):  # neighbouring seeds draw independently
        pairs[pair] += 1
    due = np.outer(probs, probs) * pairs.sum()
    assert float(((pairs - due) ** 2 / due).sum()) < 60  # 24 degrees of freedom
