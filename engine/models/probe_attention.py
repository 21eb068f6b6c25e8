"""The attention with which `engine.models.probe` runs a model at start-up.

It computes every kind of attention over whole tensors, as plainly as it can, and notes what each
layer asks for. So it is also where a layer's layout is read off.
"""

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionCall, AttentionOptions, PagedAttention, attend_dense
from engine.attention.compressed import (
    Compressor,
    EntryRows,
    SeenEntries,
    attend_entries,
    seen_entries,
)
from engine.attention.recurrent import Piece, RecurrentStates, StatePort
from engine.attention.sparse import IndexRows, attend_picked, picked
from engine.attention.states import windows_of
from engine.batch import Span
from tiers.blocks.layout import LayerLayout

Pieces = Sequence[tuple[int, int, int]]  # (sequence's first position, offset in it, tokens)


class Enough(Exception):
    """Stops a forward: the requested layers have their keys and values."""


class ProbeAttention(PagedAttention):
    """Attention over the keys and values of this and earlier calls. Notes each layer's options.

    `kept` holds keys and values, each [N, Hkv, D], by (sequence, layer). A sequence is named by its
    first position.
    """

    def __init__(self, stop_after: int | None = None, port: StatePort | None = None) -> None:
        self.layers: list[int] = []
        self.options: dict[int, AttentionOptions] = {}
        self.layouts: dict[int, LayerLayout] = {}
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.rates: dict[int, int] = {}  # of layers with compressed entries
        self._stop_after = stop_after
        self._port = port
        self.states = RecurrentStates()
        self._num_attended = 0
        self._pieces: Pieces = ()
        self._picked: list[torch.Tensor] = []  # of each piece, as far as an index picks

    def begin(self, spans: Sequence[Span]) -> None:
        pass

    def take(self, pieces: Pieces) -> None:
        """Set the sequences of the next call, in the order of its tokens."""
        self._pieces = pieces
        self._num_attended = 0
        if self._port is not None:
            self._port.states = self.states
            self.states.begin([Piece(*piece) for piece in pieces])

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, _, key, value, options = call
        if self._port is not None:
            layer = self._num_attended
            self._num_attended += 1
        self.layers.append(layer)
        self.options[layer] = options
        self.layouts[layer] = _layout_of(key, value)
        outputs, first = [], 0
        for number, (sequence, offset, count) in enumerate(self._pieces):
            rows = slice(first, first + count)
            keys, values = key[rows], value[rows]
            if offset:
                before = self.kept[sequence, layer]
                keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
            self.kept[sequence, layer] = keys, values
            chosen = self._picked[number] if options.picked else keys.new_empty(0)
            border = rows.stop - len(chosen)
            if border > first:
                end = len(keys) - len(chosen)
                dense = (call.query[first:border], keys[:end], values[:end])
                outputs.append(attend_dense(*dense, offset, options))
            if len(chosen):
                asked, own = call.query[border : rows.stop], keys[:, 0][chosen]
                outputs.append(attend_picked(asked, own, values.shape[2], options))
            first = rows.stop
        if layer == self._stop_after:
            raise Enough
        return torch.cat(outputs)

    def pick(self, layer: int, rows: IndexRows) -> None:
        """See `engine.attention.sparse.PagedIndex`."""
        size = rows.key.shape[1]
        self.layouts[layer] = LayerLayout(1, size, size, shared=True, picks=rows.top_k)
        self._picked, first = [], 0
        for sequence, offset, count in self._pieces:
            end = first + count
            keys = rows.key[first:end, None]
            if offset:
                keys = torch.cat([self.kept[sequence, layer][0], keys])
            self.kept[sequence, layer] = (keys, keys)
            border = min(end, max(first, first + rows.top_k - offset))
            query, weights = rows.query[border:end], rows.weights[border:end]
            start = offset + border - first
            self._picked.append(
                picked(query, weights, keys[:, 0], start, rows.top_k)
                if border < end
                else torch.empty(0, rows.top_k, dtype=torch.long, device=keys.device)
            )
            first = end

    def attend_with(self, call: AttentionCall, step: EntryRows) -> torch.Tensor:
        """See `engine.attention.compressed.PagedEntries`."""
        layer, outputs, first = call.layer, [], 0
        self.layers.append(layer)
        self.options[layer], self.rates[layer] = call.options, step.compressor.rate
        self.layouts[layer] = _layout_of(call.key, call.value)
        self.layouts |= step.compressor.layouts()
        if step.indexed is not None:
            self.layouts |= step.indexed.compressor.layouts(step.indexed.top_k)
        for sequence, offset, count in self._pieces:
            own = slice(first, first + count)
            key = self._joined(sequence, layer, offset, call.key[own])
            entries = self._entries(sequence, offset, step.compressor, step.rows[own])
            keys = None
            if step.indexed is not None:
                keys = self._entries(
                    sequence, offset, step.indexed.compressor, step.indexed.rows[own]
                )
            seen = seen_entries(step, own, offset, keys)
            table = torch.zeros(1, dtype=torch.long, device=seen.device)
            beside = SeenEntries(entries[None], table, seen)
            outputs.append(attend_entries(call.of(own), key[:, 0], offset, beside))
            first = own.stop
        if layer == self._stop_after:
            raise Enough
        return torch.cat(outputs)

    def _entries(
        self, sequence: int, offset: int, compressor: Compressor, rows: torch.Tensor
    ) -> torch.Tensor:
        """A sequence's entries up to this call."""
        rows = self._joined(sequence, compressor.rows, offset, rows)
        before = compressor.nothing(-compressor.first_row(0), rows)
        entries = compressor.made(torch.cat([before, rows]), sequence)
        self.kept[sequence, compressor.entries] = (entries, entries)
        return entries

    def _joined(self, sequence: int, layer: int, offset: int, rows: torch.Tensor) -> torch.Tensor:
        """A sequence's rows of this and earlier calls."""
        if offset:
            rows = torch.cat([self.kept[sequence, layer][0], rows])
        self.kept[sequence, layer] = (rows, rows)
        return rows

    def recall(self, layer: int, rows: torch.Tensor, width: int) -> torch.Tensor:
        """See `engine.attention.states.PagedStates`."""
        self.layers.append(layer)
        self.options[layer] = AttentionOptions(scaling=1.0, window=width)
        size = rows.shape[1]
        # One row more than is read back: see `engine.attention.states`.
        self.layouts[layer] = LayerLayout(1, size, size, shared=True, window=width, rows=width)
        recalled, first = [], 0
        for sequence, offset, count in self._pieces:
            own = rows[first : first + count]
            before = self.kept[sequence, layer][0] if offset else own[:0]
            known = torch.cat([own.new_zeros(width, size), before])[len(before) + 1 :]
            recalled.append(windows_of(known, own))
            self.kept[sequence, layer] = (torch.cat([before, own]),) * 2
            first += count
        if layer == self._stop_after:
            raise Enough
        return torch.cat(recalled)

    def finish(self) -> None:
        if self._port is not None:
            self.states.finish()


def _layout_of(key: torch.Tensor, value: torch.Tensor) -> LayerLayout:
    _, num_heads, key_dim = key.shape
    within = value.data_ptr() == key.data_ptr() and value.stride() == key.stride()
    return LayerLayout(num_heads, key_dim, value.shape[2], shared=within)
