"""The one layout of a block, the same in every tier: block-first and contiguous."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Self

import xxhash

from tiers.blocks.part import Part

if TYPE_CHECKING:
    import torch  # a server before endpoints has no use for it

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # by the name of a dtype


# A block costs the same whatever its bytes: 700 of Python, a lookup, a copy and a record, of which
# some 35 us to read. At `SMALL_NBYTES` that is a seventh of the time to read it. A longer block
# rounds hits down further. (docs/models.md, "Block size")
BLOCK_SIZES = (64, 128, 256)
SMALL_NBYTES = 1 << 19
MOST_LESSER = 8  # blocks without windows in a frame
APART_SHARE = 1 / 4  # of a block: a smaller window part saves less than a record of its own costs


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What a layer stores per token: a key and a value for each head.

    With `shared`, the value is the first `value_dim` numbers of the key and is not stored
    separately. An example is multi-head latent attention (DeepSeek): the key of its one head is the
    latent followed by the rotated part, and its value is the latent.

    A layer with `rows` stores a state: only the last rows of a block, which summarise all rows
    before them. An example is short convolutions (LFM2).
    """

    num_heads: int
    key_dim: int
    value_dim: int
    shared: bool = False
    window: int | None = None  # tokens a position attends to, including itself; None: all
    rows: int | None = None  # stored per block: position p is row p % rows; None: one per token

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers per head of each stored part: key and value, or only the key."""
        return (self.key_dim,) if self.shared else (self.key_dim, self.value_dim)

    @property
    def row_items(self) -> int:
        return self.num_heads * sum(self.parts)

    def rows_of(self, block_size: int) -> int:
        return self.rows or block_size

    def items(self, block_size: int) -> int:
        return self.row_items * self.rows_of(block_size)


class StateTensor(NamedTuple):
    """One tensor of a sequence's recurrent state. `dtype` is a name from `ITEM_BYTES`."""

    layer: int
    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return -(-prod(self.shape) * ITEM_BYTES[self.dtype] // 16) * 16


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Layer after layer, part after part, each `[block_size, num_heads, dim]`; contiguous.

    Layers with a sliding window come last. So of a long prefix only the last `reach` blocks are
    needed completely; of the blocks before them, the first `lasting_nbytes` bytes are enough.

    If all layers have parts of one shape, `shape` has an axis for each dimension. For most models
    it is `[num_layers, 2, block_size, num_kv_heads, head_dim]`, with (key, value) on axis 1.
    Otherwise it is flat. `dtype` is a name from `ITEM_BYTES`.

    `states` are the recurrent states of a sequence, which blocks do not hold. If there are any, a
    prefix can be resumed only where a checkpoint of them was taken.
    """

    layers: tuple[LayerLayout, ...]
    block_size: int
    dtype: str
    states: tuple[StateTensor, ...] = ()

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
        alike = len(shapes) == 1 and len({*first.parts}) == 1
        if alike and not self.has_states:
            head = (first.num_heads, first.key_dim)
            return (len(self.layers), len(first.parts), self.block_size, *head)
        return (self._items,)

    @property
    def torch_dtype(self) -> "torch.dtype":
        return torch_dtype(self.dtype)

    @property
    def token_nbytes(self) -> int:
        """Bytes per token over all layers, including its share of a block's states."""
        return self.nbytes // self.block_size

    @property
    def nbytes(self) -> int:
        return self._items * ITEM_BYTES[self.dtype]

    @property
    def lasting_nbytes(self) -> int:
        """Leading bytes of a block that belong to layers without a window."""
        lasting = [layer for layer in self.layers if layer.window is None]
        return sum(e.items(self.block_size) for e in lasting) * ITEM_BYTES[self.dtype]

    @property
    def has_states(self) -> bool:
        """Whether a layer stores a state. If so, prefixes resume only at the ends of blocks."""
        return any(layer.rows for layer in self.layers)

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is that of checkpoints, and no tokens have a part in it."""
        return all(layer.rows for layer in self.layers)

    @property
    def checkpoint(self) -> "BlockLayout":
        """The layout of a checkpoint of all states, which belongs to the block before it."""
        assert self.states
        size = sum(state.nbytes for state in self.states) // ITEM_BYTES["float32"]
        return BlockLayout((LayerLayout(1, size, size, True, rows=1),), self.block_size, "float32")

    def part_nbytes(self, part: Part) -> int:
        if part is Part.WHOLE:
            return self.nbytes
        return self.lasting_nbytes if part is Part.LASTING else self.nbytes - self.lasting_nbytes

    @property
    def apart(self) -> bool:
        """Whether tiers below memory keep the window part of a block in a record of its own."""
        return self.nbytes - self.lasting_nbytes >= APART_SHARE * self.nbytes

    @property
    def num_lesser(self) -> int:
        """How many blocks without their windows have room in a frame. A few at most, so that a
        frame is not kept by one of many."""
        if not self.apart:
            return 1
        return min(MOST_LESSER, self.nbytes // max(1, self.lasting_nbytes))

    @property
    def reach(self) -> int:
        """The number of blocks before a position that cover all windows; 0 without windows."""
        widest = max((layer.window or 0 for layer in self.layers), default=0)
        return -(-widest // self.block_size)

    def digest(self) -> bytes:
        """A 16-byte digest that differs for any layout whose blocks would be read wrongly."""
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
        if self.states:
            text += f":{[tuple(state) for state in self.states]}"
        return xxhash.xxh3_128_digest(text.encode())

    @property
    def _items(self) -> int:
        return sum(layer.items(self.block_size) for layer in self.layers)


def torch_dtype(name: str) -> "torch.dtype":
    """The dtype of a name from `ITEM_BYTES`."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def sized_layout(
    layers: tuple[LayerLayout, ...],
    dtype: str,
    states: tuple[StateTensor, ...] = (),
    *,
    block_size: int | None = None,
) -> BlockLayout:
    """The layout of a model's blocks of `block_size` tokens. None takes the first of `BLOCK_SIZES`
    with which a block has `SMALL_NBYTES`, or the last."""
    sizes = BLOCK_SIZES if block_size is None else (block_size,)
    layouts = [BlockLayout(layers, size, dtype, states) for size in sizes]
    return next((each for each in layouts if each.nbytes >= SMALL_NBYTES), layouts[-1])


def stored_order(layers: Sequence[LayerLayout]) -> list[int]:
    """The layers in a block's order: first those without windows, then with, then states."""

    def place(number: int) -> tuple[bool, bool]:
        return layers[number].window is not None, layers[number].rows is not None

    return sorted(range(len(layers)), key=place)


def block_size_of(num_items: int, layers: Sequence[LayerLayout]) -> int:
    """The number of tokens in a block of `num_items` numbers."""
    states = sum(layer.items(0) for layer in layers if layer.rows)
    each = sum(layer.row_items for layer in layers if not layer.rows)
    return (num_items - states) // each if each else 0


def part_views(blocks: "torch.Tensor", layers: Sequence[LayerLayout]) -> "list[list[torch.Tensor]]":
    """Each layer's parts as `[num_blocks, block_size, num_heads, dim]`, over the same memory; a
    state has its rows in place of `block_size`.

    blocks: [num_blocks, *shape of their layout].
    """
    flat = blocks.flatten(1)
    block_size = block_size_of(flat.shape[1], layers)
    order = stored_order(layers)
    shapes = [
        (layers[n].rows_of(block_size), layers[n].num_heads, dim)
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
