"""The inputs of a short step at fixed addresses: groups of successive tokens, of one sequence each.

A decode step is groups of one token. A tail of a cached prompt is groups of several, which read its
keys together: ten tokens after 16k would otherwise read 160k keys. Engine thread only.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.base import DecodeRows
from engine.batch import Span

_PER_TOKEN = 4  # columns: token, position, and where its KV goes: block and row
_PER_GROUP = 2  # columns: keys that the last token sees, and how many tokens there are
_ALIGNED = 4  # columns, 16 bytes: kernels are compiled anew for tables that begin elsewhere


class GroupedRows:
    """G groups of `width` tokens, padded where there are fewer. `sizes` are the numbers of groups
    that a step may have, ascending. A step is padded to one of them with groups of one token in a
    scratch block. Padding by repeating a sequence would repeat its attention."""

    def __init__(
        self,
        width: int,
        sizes: Sequence[int],
        max_blocks: int,
        *,
        block_size: int,
        scratch: int,
        device: torch.device,
    ) -> None:
        self.width = width
        self.sizes = tuple(sizes)
        self._block_size = block_size
        self._scratch = scratch
        self._counts = _PER_TOKEN * width
        self._columns = -(-(self._counts + _PER_GROUP) // _ALIGNED) * _ALIGNED
        shape = (self.sizes[-1], self._columns + max_blocks)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._values = self._host.numpy()
        self._padding = np.zeros(shape[1], np.int32)
        self._padding[2 * width : 3 * width] = scratch
        self._padding[self._counts : self._counts + _PER_GROUP] = 1  # its own key, of one token
        self._padding[self._columns] = scratch

    def holds(self, spans: Sequence[Span]) -> bool:
        """Whether there are groups enough."""
        return sum(map(self._num_groups, spans)) <= self.sizes[-1]

    def num_keys(self, spans: Sequence[Span], longer_than: int) -> int:
        """How many keys the groups of spans of more tokens read, at most."""
        return sum(
            self._num_groups(span) * (span.start + len(span.tokens))
            for span in spans
            if len(span.tokens) > longer_than
        )

    def _num_groups(self, span: Span) -> int:
        return -(-len(span.tokens) // self.width)

    def fill(self, spans: Sequence[Span]) -> tuple[int, list[int]]:
        """Fill in a step. Returns its size, and the row of each span's last token."""
        group, lasts = 0, []
        for span in spans:
            num_tokens = len(span.tokens)
            for offset in range(0, num_tokens, self.width):
                count = min(self.width, num_tokens - offset)
                self._fill(self._values[group], span, offset, count)
                group += 1
            lasts.append((group - 1) * self.width + count - 1)
        size = next(size for size in self.sizes if size >= group)
        self._values[group:size] = self._padding
        self._upload(size)
        return size, lasts

    def pad(self, size: int) -> None:
        """Fill in a step that reads and writes the scratch block alone."""
        self._values[:size] = self._padding
        self._upload(size)

    def _fill(self, values: np.ndarray, span: Span, offset: int, count: int) -> None:
        width, block_size = self.width, self._block_size
        start = span.start + offset
        end = start + count
        table = span.block_table[: (end - 1) // block_size + 1]
        values[self._columns : self._columns + len(table)] = table
        if width == 1:  # of a decode step there are many, which arrays would slow
            block = table[-1] if span.write_kv else self._scratch
            token = span.tokens[offset]
            values[: _PER_TOKEN + _PER_GROUP] = token, start, block, start % block_size, end, 1
            return
        if count < width:
            values[: self._counts] = self._padding[: self._counts]
        values[self._counts : self._counts + _PER_GROUP] = end, count
        positions = np.arange(start, end)
        rows = values[: self._counts].reshape(_PER_TOKEN, width)
        rows[0, :count] = span.tokens[offset : offset + count]
        rows[1, :count] = positions
        blocks = values[self._columns + positions // block_size]
        rows[2, :count] = blocks if span.write_kv else self._scratch
        rows[3, :count] = positions % block_size

    def _upload(self, size: int) -> None:
        # The previous copy has arrived, because the host has read its step's tokens since.
        self._device[:size].copy_(self._host[:size], non_blocking=True)

    def read(self, size: int) -> tuple[torch.Tensor, torch.Tensor, DecodeRows]:
        """The step of that size, on the device: tokens and positions [1, R], and the rest."""
        inputs = self._device[:size]
        each = inputs[:, : self._counts].unflatten(1, (_PER_TOKEN, self.width))
        tokens, positions, blocks, rows = each.transpose(0, 1).flatten(1).long()
        of_groups = inputs[:, self._counts : self._counts + _PER_GROUP]
        lengths, counts = of_groups.t().contiguous()
        tables = inputs[:, self._columns :]
        keys = DecodeRows(tables, lengths, blocks, rows, counts if self.width > 1 else None)
        return tokens[None], positions[None], keys
