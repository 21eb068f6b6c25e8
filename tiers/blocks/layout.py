"""The one layout of a block, the same in every tier: block-first and contiguous."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
import xxhash

from tiers.blocks.part import Part

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What a layer keeps of a token: for each head a key and a value.

    With `shared`, the value is the first `value_dim` numbers of the key and is not kept a second
    time. So it is with multi-head latent attention (DeepSeek): the key of its one head is the
    latent and, beside it, the rotated part; its value is the latent.

    A layer with `rows` keeps a state: of a block its last rows alone, which stand for all before
    them. So it is with short convolutions (LFM2).
    """

    num_heads: int
    key_dim: int
    value_dim: int
    shared: bool = False
    window: int | None = None  # tokens that a position sees, itself included; None: all before it
    rows: int | None = None  # kept of a block: position p is row p % rows; None: one for each token

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers a head of each part that is kept: key and value, or the key alone."""
        return (self.key_dim,) if self.shared else (self.key_dim, self.value_dim)

    @property
    def token_items(self) -> int:
        return self.num_heads * sum(self.parts)

    def items(self, block_size: int) -> int:
        """Numbers of a block."""
        return self.token_items * (self.rows or block_size)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Layer after layer, part after part, each `[block_size, num_heads, dim]`; contiguous.

    Layers with a sliding window come last: of a long prefix only its last `reach` blocks are needed
    whole, and of all before these the first `lasting_nbytes` bytes.

    Where all layers keep parts of one shape, `shape` has an axis for each of these, and for most
    models it is `[num_layers, 2, block_size, num_kv_heads, head_dim]`, axis 1 being (key, value).
    Elsewhere it is flat. `dtype` is a name from `DTYPES`.
    """

    layers: tuple[LayerLayout, ...]
    block_size: int
    dtype: str

    @classmethod
    def uniform(
        cls, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> Self:
        """The common case: keys and values of one shape in every layer."""
        return cls((LayerLayout(num_kv_heads, head_dim, head_dim),) * num_layers, block_size, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.layers[0]
        shapes = {(*layer.parts, layer.num_heads) for layer in self.layers}
        if len(shapes) == 1 and len({*first.parts}) == 1 and not self.has_states:
            head = (first.num_heads, first.key_dim)
            return (len(self.layers), len(first.parts), self.block_size, *head)
        return (self._items,)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def token_nbytes(self) -> int:
        """Bytes that one token has over all layers, with its part of a block's states."""
        return self.nbytes // self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self._items * self.torch_dtype.itemsize

    @property
    def lasting_nbytes(self) -> int:
        """Bytes of a block, its first, that layers without a window keep; all where none has."""
        lasting = [layer for layer in self.layers if layer.window is None]
        return sum(e.items(self.block_size) for e in lasting) * self.torch_dtype.itemsize

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state: then a prefix is taken up where a block ends alone."""
        return any(layer.rows for layer in self.layers)

    def part_nbytes(self, part: Part) -> int:
        """Bytes of a part of a block."""
        if part is Part.WHOLE:
            return self.nbytes
        return self.lasting_nbytes if part is Part.LASTING else self.nbytes - self.lasting_nbytes

    @property
    def reach(self) -> int:
        """How many blocks before a position hold all that its windows see; 0: there are none."""
        widest = max((layer.window or 0 for layer in self.layers), default=0)
        return -(-widest // self.block_size)

    def digest(self) -> bytes:
        """16 bytes that differ whenever a block of another layout would be read wrongly."""
        first = self.layers[0]
        if self.reach:
            each = [
                (e.num_heads, *e.parts, e.value_dim, e.window, *([e.rows] if e.rows else []))
                for e in self.layers
            ]
            text = f"cachesvc.layout.v3:{self.block_size}:{each}:{self.dtype}"
        elif first.shared or len(self.shape) == 1:
            layers = [(each.num_heads, *each.parts, each.value_dim) for each in self.layers]
            text = f"cachesvc.layout.v2:{self.block_size}:{layers}:{self.dtype}"
        else:
            text = f"cachesvc.layout.v1:{self.shape}:{self.dtype}"
        return xxhash.xxh3_128_digest(text.encode())

    @property
    def _items(self) -> int:
        return sum(layer.items(self.block_size) for layer in self.layers)


def stored_order(layers: Sequence[LayerLayout]) -> list[int]:
    """The layers in the order in which a block holds them: those with windows last, and after these
    those with states."""

    def place(number: int) -> tuple[bool, bool]:
        return layers[number].window is not None, layers[number].rows is not None

    return sorted(range(len(layers)), key=place)


def block_size_of(num_items: int, layers: Sequence[LayerLayout]) -> int:
    """How many tokens a block of so many numbers has."""
    states = sum(layer.items(0) for layer in layers if layer.rows)
    return (num_items - states) // sum(layer.token_items for layer in layers if not layer.rows)


def part_views(blocks: torch.Tensor, layers: Sequence[LayerLayout]) -> list[list[torch.Tensor]]:
    """Each layer's parts as `[num_blocks, block_size, num_heads, dim]`, over the same memory; a
    state has its rows in place of `block_size`.

    blocks: [num_blocks, *shape of their layout].
    """
    flat = blocks.flatten(1)
    block_size = block_size_of(flat.shape[1], layers)
    order = stored_order(layers)
    shapes = [
        (layers[n].rows or block_size, layers[n].num_heads, dim)
        for n in order
        for dim in layers[n].parts
    ]
    bounds = [0]
    for num_rows, num_heads, dim in shapes:
        bounds.append(bounds[-1] + num_rows * num_heads * dim)
    views = iter(
        flat[:, start:end].unflatten(1, shape)
        for (start, end), shape in zip(pairwise(bounds), shapes, strict=True)
    )
    by_layer = {number: [next(views) for _ in layers[number].parts] for number in order}
    return [by_layer[number] for number in range(len(layers))]
