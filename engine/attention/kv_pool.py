"""Attention's views of the device pool: each layer's keys and values in all blocks."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from tiers.blocks.layout import LayerLayout, block_size_of, part_views, stored_order


class LayerKv(NamedTuple):
    """One layer's keys `[num_blocks, block_size, Hkv, Dk]` and values `[..., Dv]`, strided views. A
    layer with `rows` has fewer rows than tokens.

    With `shared`, values are the first Dv numbers of the keys, so writing a key writes its value.
    """

    key: torch.Tensor
    value: torch.Tensor
    shared: bool


class KvPool:
    """Views of the pool `tensor`. `layers[i]` is the view of layer i.

    `pages[i]` is layer i as a kernel reads it in place: `[num_blocks, 2, block_size, Hkv, D]`, or
    `[num_blocks, 1, block_size, 1, D]` of latents. Layers of another form have none.

    `runs` views the same memory as runs of adjacent parts of one shape, `[num_blocks, parts,
    block_size, Hkv, D]` each, which can be copied in one call. Most models have one run.
    `windows[i]` is the window of all layers in run i. `attended` are the layers in runs, in their
    order: not those with states, whose rows `states` counts.
    `order` is the order of the layers in a block, and `places[layer]` is a layer's position in it.
    """

    def __init__(self, tensor: torch.Tensor, layers: Sequence[LayerLayout] = ()) -> None:
        """`layers` may be omitted if all keys and values have one shape."""
        layers = layers or _uniform(tensor)
        self.tensor = tensor
        self.layers: list[LayerKv] = []
        for layout, parts in zip(layers, part_views(tensor, layers), strict=True):
            value = parts[0][..., : layout.value_dim] if layout.shared else parts[1]
            self.layers.append(LayerKv(parts[0], value, layout.shared))
        self.block_size = block_size_of(tensor[0].numel(), layers)
        self.order = stored_order(layers)
        self.places = {layer: place for place, layer in enumerate(self.order)}
        self.states = {number: layer.rows for number, layer in enumerate(layers) if layer.rows}
        self.pages = {
            number: page for number, page in enumerate(map(_page, self.layers)) if page is not None
        }
        self.attended = [n for n in self.order if not layers[n].rows]  # they come first
        self.windows: list[int | None] = []
        self.runs = self._runs(layers)

    def _runs(self, layers: Sequence[LayerLayout]) -> list[torch.Tensor]:
        flat = self.tensor.flatten(1)
        shapes = [
            (layers[n].num_heads, dim, layers[n].window)
            for n in self.attended
            for dim in layers[n].parts
        ]
        runs, start = [], 0
        for (num_heads, dim, window), parts in groupby(shapes):
            shape = (len(list(parts)), self.block_size, num_heads, dim)
            end = start + torch.Size(shape).numel()
            self.windows.append(window)
            runs.append(flat[:, start:end].unflatten(1, shape))
            start = end
        return runs


def _page(kept: LayerKv) -> torch.Tensor | None:
    """See `KvPool.pages`. A layer's values follow its keys."""
    key, value = kept.key, kept.value
    if kept.shared:
        return key[:, None] if key.shape[2] == 1 else None
    if key.shape != value.shape:
        return None
    apart = value.storage_offset() - key.storage_offset()
    shape = (len(key), 2, *key.shape[1:])
    return key.as_strided(shape, (key.stride(0), apart, *key.stride()[1:]))


def _uniform(tensor: torch.Tensor) -> list[LayerLayout]:
    _, num_layers, parts, _, num_heads, dim = tensor.shape
    assert parts == 2, tensor.shape
    return [LayerLayout(num_heads, dim, dim)] * num_layers
