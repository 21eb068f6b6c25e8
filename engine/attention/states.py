"""Layers with a state instead of each token's KV: short convolutions (LFM2, arXiv 2511.23404).

A short convolution reads the rows of its position and of the few before it. The pool keeps the last
rows of each block, with position p in row `p % rows`. That is the state at the block's end, from
which any continuation is computed. One row more is kept than the convolution reads back, so that
the last token of a block can be computed again, as a fully cached prompt requires.

Engine thread only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.attention.base import AttentionCall, DecodeRows, PagedAttention
from engine.attention.kv_pool import KvPool
from engine.batch import Span
from engine.hardware import upload
from tiers.blocks.layout import LayerLayout


class PagedStates(Protocol):
    """What a short convolution needs in addition to `PagedAttention`."""

    def recall(self, layer: int, rows: torch.Tensor, width: int) -> torch.Tensor:
        """rows: [T, C], the layer's rows of the step's tokens. Returns [T, width, C]: for each
        token the rows of the `width` positions up to its own, with zeros before position 0."""
        ...


class _Places(NamedTuple):
    """Where a step of T tokens finds the rows before its own, and where it leaves its last ones.

    blocks, rows: [M], rows in the pool. seen: [T, width], for each token the rows up to its own,
    as numbers in (a row of zeros, the M rows of the pool, the step's own).
    """

    blocks: torch.Tensor
    rows: torch.Tensor
    seen: torch.Tensor


class _Written(NamedTuple):
    """The step's rows [W] that are kept, and their places in the pool."""

    sources: torch.Tensor
    blocks: torch.Tensor
    rows: torch.Tensor


class StatefulAttention:
    """An attention, with states beside it. A step's states enter the pool only at its end, so a
    failed step leaves the states from which it began.

    Rows are found by index, the same for all layers, so a layer is a few operations, however many
    sequences there are.
    """

    sees_its_step = False  # a state enters the pool at the end of a step

    def __init__(
        self, attention: PagedAttention, pool: torch.Tensor, layers: Sequence[LayerLayout]
    ) -> None:
        self.attention: Any = attention
        self._kv = KvPool(pool, layers)
        self._spans: Sequence[Span] = ()
        self._decode: DecodeRows | None = None
        self._computed: dict[int, torch.Tensor] = {}
        self._places: dict[tuple[int, int, int], _Places] = {}

    @property
    def in_place(self) -> bool:
        """Whether those of the attention beside it are."""
        return getattr(self.attention, "in_place", False)

    def begin(self, spans: Sequence[Span]) -> None:
        self._spans, self._decode = spans, None
        self._computed.clear()
        self._places.clear()
        self.attention.begin(spans)

    def begin_decode(self, decode: DecodeRows) -> None:
        self._decode = decode
        self._computed.clear()
        self._places.clear()
        self.attention.begin_decode(decode)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        output: torch.Tensor = self.attention.attend(call)
        return output

    def recall(self, layer: int, rows: torch.Tensor, width: int) -> torch.Tensor:
        """See `PagedStates`. Rows are rounded as the pool rounds them, so that cold and hit
        agree."""
        kept = self._kv.layers[layer].key[:, :, 0]  # [num_blocks, rows, C]
        self._computed[layer] = rounded = rows.to(kept.dtype)
        form = (len(rows), width, kept.shape[1])
        if form not in self._places:
            find = self._places_of_spans if self._decode is None else self._places_of_tokens
            self._places[form] = find(*form)
        places = self._places[form]
        before = kept[places.blocks, places.rows]
        known = torch.cat([before.new_zeros(1, before.shape[1]), before, rounded])
        return known[places.seen].to(rows.dtype)

    def _places_of_spans(self, num_rows: int, width: int, num_kept: int) -> _Places:
        """For a step from spans. Its last rows may be padding, which sees zeros."""
        blocks: list[int] = []
        positions: list[int] = []
        seen = np.zeros((num_rows, width), np.int64)
        first = 0
        for span in self._spans:
            earlier = range(max(0, span.start - width + 1), span.start)
            numbers = np.zeros(width - 1 + len(span.tokens), np.int64)
            numbers[width - 1 - len(earlier) : width - 1] = (
                np.arange(len(earlier)) + len(blocks) + 1
            )
            numbers[width - 1 :] = -np.arange(first + 1, first + 1 + len(span.tokens))
            count = len(span.tokens)
            seen[first : first + count] = np.lib.stride_tricks.sliding_window_view(numbers, width)
            blocks += [span.block_table[p // self._kv.block_size] for p in earlier]
            positions += earlier
            first += count
        own = seen < 0
        seen[own] = len(blocks) - seen[own]
        rows = np.array(positions, np.int64) % num_kept
        return _Places(
            self._upload(np.array(blocks, np.int64)), self._upload(rows), self._upload(seen)
        )

    def _places_of_tokens(self, num_rows: int, width: int, num_kept: int) -> _Places:
        """For a step from tensors, without a wait for the device."""
        assert self._decode is not None
        tables, positions = self._decode.tables, self._decode.lengths.long() - 1
        earlier = positions[:, None] + torch.arange(1 - width, 0, device=positions.device)
        there = earlier.clamp(min=0)
        blocks = tables.gather(1, there // self._kv.block_size).long()
        numbers = torch.arange(1, earlier.numel() + 1, device=positions.device).view_as(earlier)
        own = torch.arange(num_rows, device=positions.device) + earlier.numel() + 1
        seen = torch.cat([numbers * (earlier >= 0), own[:, None]], 1)
        return _Places(blocks.flatten(), (there % num_kept).flatten(), seen)

    def finish(self) -> None:
        self.attention.finish()
        written: dict[int, _Written] = {}
        for layer, rows in self._computed.items():
            kept = self._kv.layers[layer].key[:, :, 0]
            if kept.shape[1] not in written:
                written[kept.shape[1]] = self._written(kept.shape[1])
            to = written[kept.shape[1]]
            kept[to.blocks, to.rows] = rows[to.sources]
        self._spans, self._decode = (), None
        self._computed.clear()
        self._places.clear()

    def _written(self, num_kept: int) -> _Written:
        """The last rows of each block that a span touches; of a decode step, every row."""
        if self._decode is not None:
            positions = self._decode.lengths.long() - 1
            everyone = torch.arange(len(positions), device=positions.device)
            return _Written(everyone, self._decode.blocks, positions % num_kept)
        written = last_rows(self._spans, self._kv.block_size, num_kept)
        return _Written(*map(self._upload, written))

    def _upload(self, values: NDArray[np.int64]) -> torch.Tensor:
        return upload(values, self._kv.tensor.device)

    def forget(self, sequence_id: int) -> None:
        self.attention.forget(sequence_id)


def last_rows(spans: Sequence[Span], block_size: int, num_kept: int) -> NDArray[np.int64]:
    """The last rows of each block that a step writes: [3, W], the row in the step, the block, and
    the row in the block. A block keeps `num_kept`."""
    places: list[tuple[int, int, int]] = []
    first = 0
    for span in spans:
        start, end = span.start, span.start + len(span.tokens)
        for number in range(start // block_size, -(-end // block_size)) if span.write_kv else ():
            stop = min(end, (number + 1) * block_size)
            for position in range(max(start, number * block_size, stop - num_kept), stop):
                source = first + position - start
                places.append((source, span.block_table[number], position % num_kept))
        first += len(span.tokens)
    return np.array(places, np.int64).reshape(-1, 3).T


def windows_of(before: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[T, width, C]: each of `rows` [T, C] after its predecessors, the first of which are
    `before`."""
    return torch.cat([before, rows]).unfold(0, len(before) + 1, 1).transpose(1, 2)


class PagedShortConv(nn.Module):
    """Replaces a short convolution module: takes the rows before a token from the states."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._layer = int(module.layer_idx)
        self.in_proj, self.out_proj = module.in_proj, module.out_proj
        weight = module.conv.weight  # [C, 1, width]
        self._weight = weight[:, 0].t().contiguous()  # [width, C]
        self._bias = module.conv.bias

    def forward(self, hidden_states: torch.Tensor, paged: PagedStates, **_: Any) -> torch.Tensor:
        gate, outer, rows = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        seen = paged.recall(self._layer, gate * rows, len(self._weight))
        summed = (seen * self._weight).sum(1)
        if self._bias is not None:
            summed = summed + self._bias
        projected: torch.Tensor = self.out_proj((outer * summed)[None])
        return projected


def page_convolutions(model: nn.Module) -> int:
    """Make every short convolution keep its rows in the pool. Returns how many there are."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_short_conv(child)
    ]
    for parent, name, module in found:
        setattr(parent, name, PagedShortConv(module))
    return len(found)


def is_short_conv(module: Any) -> bool:
    """Whether the module is a short convolution, whose rows the pool keeps."""
    needed = ("in_proj", "out_proj", "conv", "conv_kernel_size", "layer_idx")
    return type(module).__name__.endswith("ShortConv") and all(hasattr(module, n) for n in needed)
