"""Layers with a state instead of each token's KV: short convolutions (LFM2, arXiv 2511.23404).

A short convolution reads the rows of its position and of the few before it. The pool keeps the last
rows of each block, with position p in row `p % rows`. That is the state at the block's end, from
which any continuation is computed. One row more is kept than the convolution reads back, so that
the last token of a block can be computed again, as a fully cached prompt requires.

Engine thread only.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from engine.attention.base import AttentionCall, PagedAttention
from engine.attention.kv_pool import KvPool
from engine.batch import Span
from tiers.blocks.layout import LayerLayout


class PagedStates(Protocol):
    """What a short convolution needs in addition to `PagedAttention`."""

    def recall(self, layer: int, rows: torch.Tensor, width: int) -> torch.Tensor:
        """rows: [T, C], the layer's rows of the step's tokens. Returns [T, width, C]: for each
        token the rows of the `width` positions up to its own, with zeros before position 0."""
        ...


class StatefulAttention:
    """An attention, with states beside it. A step's states enter the pool only at its end, so a
    failed step leaves the states from which it began."""

    def __init__(
        self, attention: PagedAttention, pool: torch.Tensor, layers: Sequence[LayerLayout]
    ) -> None:
        self.attention = attention
        self._kv = KvPool(pool, layers)
        self._spans: Sequence[Span] = ()
        self._computed: dict[int, torch.Tensor] = {}

    def begin(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._computed.clear()
        self.attention.begin(spans)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.attention.attend(call)

    def recall(self, layer: int, rows: torch.Tensor, width: int) -> torch.Tensor:
        """See `PagedStates`. Rows are rounded as the pool rounds them, so that cold and hit
        agree."""
        kept = self._kv.layers[layer].key[:, :, 0]  # [num_blocks, rows, C]
        self._computed[layer] = rounded = rows.to(kept.dtype)
        rounded = rounded.to(rows.dtype)
        recalled = []
        first = 0
        for span in self._spans:
            own = rounded[first : first + len(span.tokens)]
            recalled.append(windows_of(self._before(kept, span, width, own), own))
            first += len(span.tokens)
        missing = len(rows) - first
        if missing:  # padding
            recalled.append(rows.new_zeros(missing, width, rows.shape[1]))
        return torch.cat(recalled)

    def _before(
        self, kept: torch.Tensor, span: Span, width: int, like: torch.Tensor
    ) -> torch.Tensor:
        """The rows of the `width - 1` positions before the span: [width - 1, C]."""
        rows = like.new_zeros(width - 1, like.shape[1])
        for place, position in enumerate(range(span.start - width + 1, span.start)):
            if position >= 0:
                block = span.block_table[position // self._kv.block_size]
                rows[place] = kept[block, position % kept.shape[1]]
        return rows

    def finish(self) -> None:
        self.attention.finish()
        first = 0
        for span in self._spans:
            if span.write_kv:
                for layer, rows in self._computed.items():
                    self._write(layer, span, rows[first : first + len(span.tokens)])
            first += len(span.tokens)
        self._spans = ()
        self._computed.clear()

    def _write(self, layer: int, span: Span, rows: torch.Tensor) -> None:
        """Store the last rows of each block that the span touches."""
        kept, size = self._kv.layers[layer].key[:, :, 0], self._kv.block_size
        start, end = span.start, span.start + len(span.tokens)
        for number in range(start // size, -(-end // size)):
            stop = min(end, (number + 1) * size)
            for position in range(max(start, number * size, stop - kept.shape[1]), stop):
                kept[span.block_table[number], position % kept.shape[1]] = rows[position - start]

    def forget(self, sequence_id: int) -> None:
        self.attention.forget(sequence_id)


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
