"""Keyed draws by the C++ kernel: argmax of logits plus Gumbel noise that is never stored.

Knows: how kernels/noise.h is called, and when threads are worth waking.
Refuses to know: temperatures, cuts, and the truth it is held to (cluster/model/sample.py).

Legend of shape suffixes: N positions, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from cluster.kernels.library import Library, open_library

_MASK = (1 << 64) - 1
_LOGITS_A_THREAD = 1 << 17  # fewer are read in less time than it takes to wake a thread


class Noise:
    """Draws from rows of logits in host memory."""

    def __init__(self, library: Library) -> None:
        self._draw = library.entry("draw", torch.float32)

    @staticmethod
    def supports(logits_NV: torch.Tensor) -> bool:
        return logits_NV.dtype == torch.float32 and logits_NV.device.type == "cpu" and logits_NV.stride(1) == 1

    def draw(self, logits_NV: torch.Tensor, rows: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """The token of each of `rows` under the noise of its key, int64 [rows].

        Exactly the largest sum, but for the last bits of the logarithms; the lowest token among equals.
        """
        vocab = logits_NV.shape[1]
        which = np.asarray(rows, np.int64)
        states = np.array([key & _MASK for key in keys], np.uint64)
        tokens = torch.empty(len(rows), dtype=torch.int64)
        threads = min(torch.get_num_threads(), 1 + len(rows) * vocab // _LOGITS_A_THREAD)
        self._draw(
            threads,
            logits_NV.data_ptr(),
            logits_NV.stride(0),
            which.ctypes.data,
            len(rows),
            vocab,
            states.ctypes.data,
            tokens.data_ptr(),
        )
        return tokens


@functools.cache  # a process loads code once; asking the compiler for its version costs more than a draw
def open_noise() -> Noise | None:
    """The kernel, or None where there are no kernels."""
    library = open_library()
    return None if library is None else Noise(library)
