"""The one layout of a block, the same in every tier: block-first and contiguous."""

from dataclasses import dataclass

import torch
import xxhash

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape and dtype: `[num_layers, 2, block_size, num_kv_heads, head_dim]`, contiguous.

    Axis 1 is (key, value). `dtype` is a name from `DTYPES`.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def token_nbytes(self) -> int:
        """Bytes of KV that one token has over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.token_nbytes * self.block_size

    def digest(self) -> bytes:
        """16 bytes that differ whenever a block of another layout would be read wrongly."""
        text = f"cachesvc.layout.v1:{self.shape}:{self.dtype}"
        return xxhash.xxh3_128_digest(text.encode())
