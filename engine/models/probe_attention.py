"""The attention with which `engine.models.probe` runs a model at start-up.

It computes every kind of attention over whole tensors, as plainly as it can, and notes what each
layer asks for. So it is also where a layer's layout is read off.
"""

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionCall, AttentionOptions, PagedAttention, attend_dense
from engine.attention.recurrent import Piece, RecurrentStates, StatePort
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
        self._stop_after = stop_after
        self._port = port
        self.states = RecurrentStates()
        self._num_attended = 0
        self._pieces: Pieces = ()

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
        for sequence, offset, count in self._pieces:
            rows = slice(first, first + count)
            keys, values = key[rows], value[rows]
            if offset:
                before = self.kept[sequence, layer]
                keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
            self.kept[sequence, layer] = keys, values
            outputs.append(attend_dense(call.query[rows], keys, values, offset, options))
            first = rows.stop
        if layer == self._stop_after:
            raise Enough
        return torch.cat(outputs)

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
