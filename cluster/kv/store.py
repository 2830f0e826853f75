"""The arena: the bytes of every key and value block, and nothing about who owns which.

Knows: the layout of a block and how many bytes it takes.
Refuses to know: sequences, reference counts, prefixes; block ids arrive from outside.

    arena[block][layer][K|V][kv_head][token][dim]      one block = one contiguous run of bytes

so that a block moves between devices, to host memory or to a peer as one copy.

Legend of shape suffixes: B blocks, L layers, H kv heads, T tokens of a block, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.errors import CapacityError, ConfigError

#: Tokens a block holds unless the configuration says otherwise (DESIGN 6).
DEFAULT_BLOCK_TOKENS = 32


class Arena:
    """Keys and values of `num_blocks` blocks on one device, as one allocation.

    The contents start undefined: a slot means nothing before something was written to it.

    Raises CapacityError when the device cannot hold it, ConfigError on sizes below one.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> None:
        sizes = {"num_blocks": num_blocks, "num_layers": num_layers, "num_kv_heads": num_kv_heads}
        sizes |= {"head_dim": head_dim, "block_tokens": block_tokens}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name}={size}: an arena needs at least 1")
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_tokens = block_tokens
        self.dtype = dtype
        self.block_bytes = self.bytes_per_block(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            block_tokens=block_tokens,
        )
        self._bytes = _allocate(num_blocks * self.block_bytes, device)
        self.device = self._bytes.device
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim)
        self._blocks_BL2HTD = self._bytes.view(dtype).view(shape)

    @staticmethod
    def bytes_per_block(
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> int:
        """Bytes one block takes: what memory planning divides by."""
        return num_layers * 2 * num_kv_heads * block_tokens * head_dim * dtype.itemsize

    @property
    def num_tokens(self) -> int:
        """How many tokens the arena has room for."""
        return self.num_blocks * self.block_tokens

    def block(self, block: int) -> torch.Tensor:
        """The bytes of one block, uint8 [block_bytes], a view."""
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of one layer, [B, H, T, D], a strided view."""
        return self._blocks_BL2HTD[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Values of one layer, [B, H, T, D], a strided view."""
        return self._blocks_BL2HTD[:, layer, 1]

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of all layers, (from, to) slots: block * block_tokens + offset. All are read first."""
        sources, places = torch.tensor(slots, dtype=torch.int64, device=self.device).unbind(1)
        size = self.block_tokens
        moved = self._blocks_BL2HTD[sources // size, :, :, :, sources % size]
        self._blocks_BL2HTD[places // size, :, :, :, places % size] = moved

    @property
    def layer_bytes(self) -> int:
        """Bytes from one layer's keys to the next layer's, inside a block."""
        return self.block_bytes // self.num_layers

    def address(self, layer: int) -> int:
        """Address of block 0's keys of one layer: kernels reach block b at b * block_bytes beyond it."""
        return self._blocks_BL2HTD[0, layer].data_ptr()


def _allocate(size: int, device: torch.device | str) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError, or the CPU allocator's plain RuntimeError
        raise CapacityError(f"a key/value arena of {size} bytes does not fit on {device}: {error}") from error
