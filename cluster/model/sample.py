"""Laws over the vocabulary and draws from them, keyed so that they can be repeated anywhere.

Knows: how temperature, top-k, top-p and min-p shape logits into a law; how a key becomes noise.
Refuses to know: drafts, acceptance, sequences. Both the drafters and the judge draw with it, so
it lies below both.

Noise is a pure function of its key: no generator state, hence the same draw alone or in a batch,
before or after a preemption, in the drafter and in the target. On CPUs a kernel draws without
storing the noise (kernels/noise.h); its logarithms differ from torch's in the last bits, so a
machine with it and one without may part where the two best sums are that close: far below the gap
at which tokens count as tied anyway.

Legend of shape suffixes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.kernels.noise import open_noise
from cluster.request import Sampling

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB

#: Below this temperature a logit of ordinary size may leave float32's range once divided.
_COLD = 1e-3

#: How many of the likeliest tokens are sorted before a full sort is tried for top-p.
_TOP_P_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """How to turn the raw logits of N positions into laws; one entry a position."""

    temperature: tuple[float, ...]
    top_k: tuple[int, ...]
    top_p: tuple[float, ...]
    min_p: tuple[float, ...]

    @staticmethod
    def of(samplings: Sequence[Sampling]) -> Shape:
        """A greedy row is cut by nothing: among equal logits a cut may spare another than argmax takes."""
        return Shape(
            tuple(s.temperature for s in samplings),
            tuple(0 if s.greedy else s.top_k for s in samplings),
            tuple(1.0 if s.greedy else s.top_p for s in samplings),
            tuple(0.0 if s.greedy else s.min_p for s in samplings),
        )

    def at(self, places: Sequence[int]) -> Shape:
        """The entries at these positions, in this order."""
        return Shape(
            tuple(self.temperature[n] for n in places),
            tuple(self.top_k[n] for n in places),
            tuple(self.top_p[n] for n in places),
            tuple(self.min_p[n] for n in places),
        )

    @property
    def greedy(self) -> bool:
        return not any(self.temperature)

    @property
    def neutral(self) -> bool:
        """True when shaping changes nothing that a draw could see."""
        untouched = not any(self.top_k) and not any(self.min_p) and all(p >= 1.0 for p in self.top_p)
        return self.greedy or (untouched and all(t in (0.0, 1.0) for t in self.temperature))


def noise_key(seed: int, *counters: int) -> int:
    """A 64-bit key from a seed and counters (SplitMix64's finaliser, Steele et al. 2014)."""
    state = _mix(seed + _GOLDEN)
    for counter in counters:
        state = _mix((state ^ (counter & _MASK)) + _GOLDEN)
    return state


def fresh_seed(seed: int, attempt: int) -> int:
    """Seeds keys that name rounds: rounds start over with every engine, their draws must not."""
    return noise_key(seed, attempt) if attempt else seed


def uniform(key: int) -> float:
    """A number in (0, 1), 52 random bits: with one more the largest would round to 1."""
    return ((_mix(key + _GOLDEN) >> 12) + 0.5) * 2.0**-52


def gumbel(keys: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, float32 [N, V]; row n is a function of keys[n] alone.

    Each entry hashes (key, token) to 31 bits; -log(-log(1 - v)) keeps float32's relative
    precision for the small v that win an argmax, so the tail reaches 2**-32.
    """
    state = torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device).unsqueeze(1)
    tokens = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    bits = state + tokens * _signed(_GOLDEN)
    bits = (bits ^ _shift(bits, 30)).mul_(_signed(_MIX_A))
    bits = (bits ^ _shift(bits, 27)).mul_(_signed(_MIX_B))
    bits = _shift(bits ^ _shift(bits, 31), 33)
    v = (bits.to(torch.float32) + 0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def shape_logits(logits_NV: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Log-weights of each position's law, float32 [N, V]: -inf outside its support.

    Processors apply in the order temperature, top-k, top-p, min-p (the order of transformers'
    warpers). Rows with temperature 0 keep their logits: their law is the argmax. Where nothing
    changes the answer is the input itself: read it, do not write to it.
    """
    if shape.neutral:
        return logits_NV
    temperature = torch.tensor([t if t > 0 else 1.0 for t in shape.temperature], device=logits_NV.device)
    shaped = _divide(logits_NV, temperature)
    _keep_top_k(shaped, shape.top_k)
    _keep_top_p(shaped, shape.top_p)
    _keep_min_p(shaped, shape.min_p)
    return shaped


def _divide(logits_NV: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
    """logits / temperature; where that could overflow, the likeliest logit is moved to 0 first."""
    cold = temperature_N < _COLD
    if bool(cold.any()):
        top_N1 = logits_NV.amax(dim=1, keepdim=True)
        logits_NV = torch.where(cold.unsqueeze(1), logits_NV - top_N1, logits_NV)
        temperature_N = temperature_N.clamp(min=torch.finfo(torch.float32).tiny)
    return logits_NV / temperature_N.unsqueeze(1)


def draw(shaped_NV: torch.Tensor, shape: Shape, keys: Sequence[int], *, kernels: bool = True) -> torch.Tensor:
    """One token a position, int64 [N]: argmax(log weight + Gumbel noise), or the plain argmax.

    The Gumbel-max trick makes this a draw from softmax(log weights); keyed by (seed, position) it
    is the coupled sampling of arXiv 2408.07978. kernels: False draws in plain torch, the truth.
    """
    if shape.greedy:
        return shaped_NV.argmax(dim=1)
    noisy = [n for n, t in enumerate(shape.temperature) if t > 0]
    chosen = _draw_noisy(shaped_NV, noisy, [keys[n] for n in noisy], kernels)
    if len(noisy) == len(keys):
        return chosen
    tokens = shaped_NV.argmax(dim=1)
    tokens[torch.tensor(noisy, device=shaped_NV.device)] = chosen
    return tokens


def _draw_noisy(shaped_NV: torch.Tensor, rows: list[int], keys: list[int], kernels: bool) -> torch.Tensor:
    """argmax(log weight + noise) of some rows, int64 [rows]."""
    noise = open_noise() if kernels else None
    if noise is not None and noise.supports(shaped_NV):
        return noise.draw(shaped_NV, rows, keys)
    chosen_NV = shaped_NV if len(rows) == len(shaped_NV) else shaped_NV[torch.tensor(rows, device=shaped_NV.device)]
    return gumbel(keys, shaped_NV.shape[1], shaped_NV.device).add_(chosen_NV).argmax(dim=1)


def probabilities(shaped_NV: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The laws themselves, float64 [N, V]; a row with temperature 0 is a point mass."""
    probs = torch.softmax(shaped_NV.double(), dim=1)
    for n, temperature in enumerate(shape.temperature):
        if temperature == 0:
            probs[n] = 0.0
            probs[n, shaped_NV[n].argmax()] = 1.0
    return probs


def _keep_top_k(shaped_NV: torch.Tensor, top_k: Sequence[int]) -> None:
    vocab = shaped_NV.shape[1]
    for n, k in enumerate(top_k):
        if 0 < k < vocab:
            values, indices = shaped_NV[n].topk(k)
            shaped_NV[n] = float("-inf")
            shaped_NV[n, indices] = values


def _keep_top_p(shaped_NV: torch.Tensor, top_p: Sequence[float]) -> None:
    """Keep the likeliest tokens whose mass first reaches top_p (always at least one)."""
    for n, p in enumerate(top_p):
        if p >= 1.0:
            continue
        probs = torch.softmax(shaped_NV[n], dim=0)
        values, indices = probs.topk(min(_TOP_P_WINDOW, probs.numel()))
        if float(values.sum()) < p:
            values, indices = probs.sort(descending=True)
        before = values.cumsum(0) - values
        dropped = torch.ones_like(probs, dtype=torch.bool)
        dropped[indices[before < p]] = False
        dropped[indices[0]] = False  # a p below float32's range compares as 0
        shaped_NV[n].masked_fill_(dropped, float("-inf"))


def _keep_min_p(shaped_NV: torch.Tensor, min_p: Sequence[float]) -> None:
    """Keep tokens at least min_p times as likely as the likeliest."""
    for n, p in enumerate(min_p):
        if p > 0.0:
            floor = shaped_NV[n].max() + torch.tensor(p, dtype=torch.float64).log().to(shaped_NV.dtype)
            shaped_NV[n].masked_fill_(shaped_NV[n] < floor, float("-inf"))


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_A) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_B) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the same 64 bits."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift right of int64 bits (torch's shift is arithmetic)."""
    return (x >> by) & ((1 << (64 - by)) - 1)
