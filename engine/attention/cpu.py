"""Attention on a CPU, over working copies of the running sequences' KV (`attention.copies`).

Same contract as `attention.ReferenceAttention`. `attention.dense` computes attention in float32,
whatever the model's dtype, in one call per part of a step and layer. Without memory for its copy, a
sequence is gathered from the pool anew for each layer. Engine thread only.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm

import torch

from engine.attention import dense
from engine.attention.base import AttentionCall, first_seen, gather, write_span
from engine.attention.copies import DEFAULT_BUDGET_BYTES, Rows, WorkingCopies, WorkingCopy
from engine.attention.kv_pool import KvPool
from engine.batch import Span
from engine.torchscript import script
from tiers.blocks.layout import LayerLayout

_TILE = 128  # query positions attended at once, so that a tile's scores stay in the cache

_TILE_ROWS = 2048  # the same, multiplied by the query heads that share a key


@dataclass(slots=True)
class _SpanPart:
    """One span's part of a step. Its rows begin at `first`. If `copy` is None, its keys and values
    are gathered."""

    span: Span
    first: int
    copy: WorkingCopy | None


@dataclass(slots=True)
class _TokenParts:
    """Adjacent spans of one token each. One call per layer writes their KV, if it is to be
    written."""

    spans: list[Span]
    first: int
    copies: list[WorkingCopy]
    runs: list[torch.Tensor]  # each copy's only run
    positions: list[int]
    written: Rows | None


class CpuAttention:
    """`PagedAttention` over working copies."""

    def __init__(
        self,
        pool: torch.Tensor,
        layers: Sequence[LayerLayout] = (),
        owners: Sequence[int] = (),
        *,
        only: Container[int] | None = None,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        """pool, layers, only: as `KvPool` takes them; owners: as `WorkingCopies` does."""
        self._kv = KvPool(pool, layers, only=only)
        self._copies = WorkingCopies(self._kv, owners, budget_bytes=budget_bytes)
        self._places = _places(self._kv)
        self._step: list[_SpanPart | _TokenParts] = []
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._triangle: torch.Tensor | None = None
        self._attend_tokens = script(dense.attend_tokens)
        self._attend_span = script(dense.attend_span)

    def begin(self, spans: Sequence[Span]) -> None:
        running = {span.sequence_id for span in spans}
        self._step = []
        opened = [(span, self._copies.open(span, running)) for span in spans]
        first = 0
        for _, group in groupby(opened, self._together):
            first = self._add(list(group), first)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        computed, query = call.query.dtype, call.query.float()
        output = query.new_empty(*query.shape[:2], call.value.shape[2])
        key, value = self._rounded(call.key), self._rounded(call.value)
        call = AttentionCall(call.layer, query, key, value, call.options)
        end = 0
        for part in self._step:
            if isinstance(part, _TokenParts):
                self._tokens(part, call, output)
                end = part.first + len(part.spans)
                continue
            end = part.first + len(part.span.tokens)
            self._span(part, call, output)
        if end < query.shape[0]:
            output[end:] = 0  # padding
        return output.to(computed)

    def finish(self) -> None:
        """Write the step's KV from the copies to the pool's blocks."""
        for part in self._step:
            if isinstance(part, _TokenParts):
                for span, copy in zip(part.spans, part.copies, strict=True):
                    self._copies.finish(copy, span)
            elif part.copy is not None:
                self._copies.finish(part.copy, part.span)
        self._step = []

    def forget(self, sequence_id: int) -> None:
        self._copies.forget(sequence_id)

    def warm_up(self, num_tokens: int) -> None:
        """Touch the memory of a copy of `num_tokens`."""
        self._copies.warm_up(num_tokens)

    # The parts of a step.

    def _together(self, opened: tuple[Span, WorkingCopy | None]) -> tuple[bool, int]:
        """The key that groups adjacent spans.

        First, whether it is one token of a sequence with a copy. Adjacent spans of that kind are
        one part of the step if all or none of them write their KV.
        """
        span, copy = opened
        if len(span.tokens) == 1 and copy is not None and self._copies.uniform:
            return True, span.write_kv
        return False, span.sequence_id

    def _add(self, group: list[tuple[Span, WorkingCopy | None]], first: int) -> int:
        """Add the part of these spans, whose rows begin at `first`. Returns the end of their
        rows."""
        span, copy = group[0]
        if not self._together(group[0])[0]:
            self._step.append(_SpanPart(span, first, copy))
            return first + len(span.tokens)
        spans, copies = [span for span, _ in group], [copy for _, copy in group if copy is not None]
        positions = [span.start for span in spans]
        written = self._copies.rows(copies, positions) if span.write_kv else None
        runs = [copy.runs[0] for copy in copies]
        self._step.append(_TokenParts(spans, first, copies, runs, positions, written))
        return first + len(group)

    # One part of a layer.

    def _tokens(self, part: _TokenParts, call: AttentionCall, output: torch.Tensor) -> None:
        (_, key_part), (_, value_part) = self._places[call.layer]
        self._attend_tokens(
            call,
            part.first,
            part.written.buffer if part.written is not None else None,
            part.written.numbers if part.written is not None else [],
            part.runs,
            key_part,
            value_part,
            part.positions,
            output,
        )

    def _span(self, part: _SpanPart, call: AttentionCall, output: torch.Tensor) -> None:
        start, num_tokens = part.span.start, len(part.span.tokens)
        if part.copy is not None:
            (key_run, key_part), (value_run, value_part) = self._places[call.layer]
            keys, values = part.copy.runs[key_run], part.copy.runs[value_run]
        else:
            rows = slice(part.first, part.first + num_tokens)
            if part.span.write_kv:
                write_span(self._kv, part.span, call.of(rows))
            keys, values, skipped = self._gathered(part.span, call.layer, call.options.window)
            key_part, value_part, start = 0, 0, start - skipped
        groups = call.query.shape[1] // call.key.shape[1]
        tile = max(1, min(_TILE, _TILE_ROWS // groups))
        if self._triangle is None:  # not earlier: the thread that makes it gets a team of threads
            self._triangle = torch.full((_TILE, _TILE), -torch.inf).triu(1)
        num_rows = groups * min(tile, num_tokens)
        size = dense.scratch_size(num_rows, start + num_tokens)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.float32)
        self._attend_span(
            call,
            part.first,
            part.span.write_kv and part.copy is not None,
            keys,
            key_part,
            values,
            value_part,
            start,
            start + num_tokens,
            tile,
            self._triangle,
            self._scratch,
            output,
        )

    def _gathered(
        self, span: Span, layer: int, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The span's keys and values of one layer as runs of one part, and how many leading
        positions they lack."""
        size = self._kv.block_size
        unit = lcm(size, dense.PIECE)
        skipped = first_seen(span.start, window) // unit * unit
        end = span.start + len(span.tokens)
        runs = []
        for rows in gather(self._kv, layer, span.block_table, end, skipped // size):
            num_keys, heads, dim = rows.shape
            run = torch.empty(1, heads, dense.padded_keys(num_keys), dim)
            run[0, :, :num_keys] = rows.transpose(0, 1)
            runs.append(run)
        return runs[0], runs[1], skipped

    def _rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows, rounded as the pool rounds them."""
        return rows if rows.dtype == self._kv.tensor.dtype else rows.to(self._kv.tensor.dtype)


def _places(kv: KvPool) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """For each layer, the run and the part in it of its keys, and of its values. They are the same
    if values are a part of the keys."""
    parts = iter(
        (number, part) for number, run in enumerate(kv.runs) for part in range(run.shape[1])
    )
    places = {}
    for layer in kv.attended:
        key = next(parts)
        places[layer] = key, key if kv.layers[layer].shared else next(parts)
    return places
