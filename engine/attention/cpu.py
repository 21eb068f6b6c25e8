"""Attention on a CPU, over working copies of the running sequences' KV (`attention.copies`).

Same contract as `attention.ReferenceAttention`. Attention is computed in float32 whatever the model
computes in. A sequence that there is no memory for a copy of is served by the reference. Engine
thread only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, groupby

import torch

from engine.attention.base import (
    AttentionOptions,
    attend_span,
    causal_mask,
    first_seen,
    softmax_with_sinks,
)
from engine.attention.copies import DEFAULT_BUDGET_BYTES, Rows, WorkingCopies, WorkingCopy
from engine.attention.kv_pool import KvPool
from engine.batch import Span
from tiers.blocks.layout import LayerLayout

_TILE = 128  # query positions attended at once: scores of a tile stay in the cache

_TILE_ROWS = 2048  # the same, times the query heads that share a key


_Layers = dict[int, tuple[torch.Tensor, torch.Tensor]]  # of each layer something for key and value


@dataclass(slots=True)
class _SpanPart:
    """One span's part of a step: its rows, and views of its copy at the positions that it writes,
    and at all up to its last, [Hkv, positions, D]. Without a copy there are none.

    Views are cut for all layers at once: a step of 16 one-token spans calls torch 8,700 times, and
    did so 11,500 times when each layer cut its own.
    """

    span: Span
    rows: slice
    copy: WorkingCopy | None
    written: _Layers
    seen: _Layers


@dataclass(slots=True)
class _TokenParts:
    """Neighbouring spans of one token each, whose KV is written by one call a layer, if at all.
    `seen` are of each layer the spans' keys [Hkv, D, positions] and values [Hkv, positions, D]."""

    spans: list[Span]
    rows: slice
    copies: list[WorkingCopy]
    written: Rows | None
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]]


class CpuAttention:
    """`PagedAttention` over working copies."""

    def __init__(
        self,
        pool: torch.Tensor,
        layers: Sequence[LayerLayout] = (),
        owners: Sequence[int] = (),
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        """pool, layers: as `KvPool` takes them; owners: as `WorkingCopies` does."""
        self._kv = KvPool(pool, layers)
        self._copies = WorkingCopies(self._kv, owners, budget_bytes=budget_bytes)
        self._parts = _part_numbers(self._kv)
        self._step: list[_SpanPart | _TokenParts] = []
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._triangles: dict[int, torch.Tensor] = {}

    def begin(self, spans: Sequence[Span]) -> None:
        running = {span.sequence_id for span in spans}
        self._step = []
        opened = [(span, self._copies.open(span, running)) for span in spans]
        first = 0
        for _, group in groupby(opened, self._together):
            first = self._add(list(group), first)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        computed = query.dtype
        query = query.float()
        output = query.new_empty(*query.shape[:2], value.shape[2])
        scaled = query * options.scaling
        key, value = self._rounded(key), self._rounded(value)
        for part in self._step:
            rows = part.rows
            if isinstance(part, _TokenParts):
                self._write_tokens(part, layer, key[rows], value[rows])
                _attend_tokens(part, layer, scaled[rows], options, output[rows])
                continue
            span = part.span
            if part.copy is None:
                output[rows] = attend_span(
                    self._kv, layer, span, query[rows], key[rows], value[rows], options
                )
                continue
            if span.write_kv:
                self._append(part.written[layer], layer, key[rows], value[rows])
            self._attend_copy(scaled[rows], *part.seen[layer], span.start, options, output[rows])
        if self._step and rows.stop < query.shape[0]:
            output[rows.stop :] = 0  # padding
        return output.to(computed)

    def finish(self) -> None:
        """Write the step's KV, which stands in the copies, to the pool's blocks."""
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
        """Whether it is one token of a sequence with a copy; such neighbours, which all write their
        KV or all do not, are one part of the step."""
        span, copy = opened
        if len(span.tokens) == 1 and copy is not None and self._copies.uniform:
            return True, span.write_kv
        return False, span.sequence_id

    def _add(self, group: list[tuple[Span, WorkingCopy | None]], first: int) -> int:
        """Add the part of these spans, whose rows begin at `first`; returns where they end."""
        span, copy = group[0]
        if not self._together(group[0])[0]:
            rows = slice(first, first + len(span.tokens))
            self._step.append(self._part(span, rows, copy))
            return rows.stop
        spans, copies = [span for span, _ in group], [copy for _, copy in group if copy is not None]
        rows = slice(first, first + len(group))
        written = None
        if span.write_kv:
            written = self._copies.rows(copies, [span.start for span in spans])
        seen = [self._seen_by(span, copy) for span, copy in zip(spans, copies, strict=True)]
        by_layer = {layer: [each[layer] for each in seen] for layer in self._parts}
        self._step.append(_TokenParts(spans, rows, copies, written, by_layer))
        return rows.stop

    def _part(self, span: Span, rows: slice, copy: WorkingCopy | None) -> _SpanPart:
        if copy is None:
            return _SpanPart(span, rows, None, {}, {})
        end = span.start + len(span.tokens)
        written: _Layers = {}
        if span.write_kv:
            parts = [part for run in copy.runs for part in run[:, :, span.start : end]]
            written = self._by_layer(parts, parts)
        parts = [part for run in copy.runs for part in run[:, :, :end]]
        return _SpanPart(span, rows, copy, written, self._by_layer(parts, parts))

    def _seen_by(self, span: Span, copy: WorkingCopy) -> _Layers:
        """What a span of one token sees, the keys transposed."""
        (run,) = copy.runs
        seen = run[:, :, : span.start + 1]
        return self._by_layer(seen.transpose(2, 3).unbind(0), seen.unbind(0))

    def _by_layer(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> _Layers:
        """Of each layer its part of `keys` and its part of `values` [Hkv, positions, D]."""
        layers = {}
        for layer, (key, value) in self._parts.items():
            own = values[value]
            if key == value:  # a leading part of the key
                own = own[..., : self._kv.layers[layer].value.shape[3]]
            layers[layer] = keys[key], own
        return layers

    # Writing to the copies.

    def _rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """As the pool rounds them."""
        return rows if rows.dtype == self._kv.tensor.dtype else rows.to(self._kv.tensor.dtype)

    def _append(
        self,
        written: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Write keys and values [T, Hkv, D] to their views [Hkv, T, D]."""
        written[0].copy_(key.transpose(0, 1))
        if not self._kv.layers[layer].shared:
            written[1].copy_(value.transpose(0, 1))

    def _write_tokens(
        self, part: _TokenParts, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """The same of one token of each of the spans, in one call each."""
        if part.written is None:
            return
        buffer, numbers = part.written.buffer, part.written.numbers
        for place, rows in zip(dict.fromkeys(self._parts[layer]), (key, value), strict=False):
            buffer.index_copy_(0, numbers[place], rows.reshape(-1, rows.shape[2]).float())

    # Attention over one copy.

    def _attend_copy(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        start: int,
        options: AttentionOptions,
        output: torch.Tensor,
    ) -> None:
        """query: [T, Hq, Dk], scaled; key, value: [Hkv, start + T, Dk or Dv];
        output: [T, Hq, Dv]."""
        if query.shape[0] == 1:
            heads = key.shape[0]
            attend_one(
                query[0].unflatten(0, (heads, -1)),
                key.transpose(1, 2),
                value,
                start,
                options,
                output[0].unflatten(0, (heads, -1)),
            )
            return
        end = start + query.shape[0]
        if value.stride(1) != value.shape[2]:
            # A leading part of keys (latents): oneDNN multiplies by rows with gaps between them a
            # thousand times more slowly (2,048 x 256 by 512: 6.3 s for 4.7 ms on an AMD EPYC).
            value = value.contiguous()
        tile = max(1, min(_TILE, _TILE_ROWS * key.shape[0] // query.shape[1]))
        for low in range(start - start % tile, end, tile):
            first, stop = max(low, start), min(low + tile, end)
            rows = slice(first - start, stop - start)
            seen = _seen(first, stop, options.window)
            self._attend_tile(
                query[rows], key[:, seen], value[:, seen], first - seen.start, options, output[rows]
            )

    def _attend_tile(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        start: int,
        options: AttentionOptions,
        output: torch.Tensor,
    ) -> None:
        """Scaled queries [T, Hq, D] at positions from `start` over keys [Hkv, start + T, D]."""
        num_queries, num_heads, dim = query.shape
        num_kv_heads, num_keys, _ = key.shape
        value_dim = value.shape[2]
        groups = num_heads // num_kv_heads
        folded = query.view(num_queries, num_kv_heads, groups, dim)
        folded = folded.permute(1, 2, 0, 3).reshape(num_kv_heads, groups * num_queries, dim)
        for head in range(num_kv_heads):
            scores = _matmul(folded[head], key[head]).view(groups, num_queries, num_keys)
            if options.softcap is not None:
                scores = torch.tanh(scores.div_(options.softcap)).mul_(options.softcap)
            if options.window is None:
                scores[:, :, start:] += self._triangle(num_queries)
            else:
                mask = causal_mask(num_queries, start, options.window, scores.device)
                scores.masked_fill_(~mask, -torch.inf)
            if options.sinks is None:
                weights = self._softmax(scores.view(-1, num_keys))
            else:
                sinks = options.sinks.view(num_kv_heads, groups, 1, 1)[head]
                weights = softmax_with_sinks(scores, sinks).view(-1, num_keys)
            attended = _matmul(weights, value[head].t()).view(groups, num_queries, value_dim)
            to = output.view(num_queries, num_kv_heads, groups, value_dim)
            to[:, head] = attended.transpose(0, 1)

    def _softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Row-wise, into memory that the next call reuses: fresh pages would cost twice as much."""
        if self._scratch.numel() < scores.numel():
            self._scratch = torch.empty(scores.numel(), dtype=scores.dtype)
        weights = self._scratch[: scores.numel()].view(scores.shape)
        return torch.softmax(scores, -1, out=weights)

    def _triangle(self, size: int) -> torch.Tensor:
        """[size, size], -inf above the diagonal."""
        triangle = self._triangles.get(size)
        if triangle is None:
            triangle = torch.full((size, size), -torch.inf).triu(1)
            self._triangles[size] = triangle
        return triangle


def _attend_tokens(
    part: _TokenParts,
    layer: int,
    query: torch.Tensor,
    options: AttentionOptions,
    output: torch.Tensor,
) -> None:
    """Scaled queries [S, Hq, Dk] and output [S, Hq, Dv], one of each sequence."""
    seen = part.seen[layer]
    heads = len(seen[0][1])
    queries = query.unflatten(1, (heads, -1)).unbind(0)
    outputs = output.unflatten(1, (heads, -1)).unbind(0)
    for span, one, (key, value), to in zip(part.spans, queries, seen, outputs, strict=True):
        attend_one(one, key, value, span.start, options, to)


def attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: int,
    options: AttentionOptions,
    output: torch.Tensor,
) -> None:
    """One scaled query [Hkv, groups, Dk] at `position` over keys [Hkv, Dk, position + 1] and values
    [Hkv, position + 1, Dv]; a group's heads share a GEMM. output: [Hkv, groups, Dv]."""
    if low := first_seen(position, options.window):
        key, value = key[:, :, low:], value[:, low:]
    scores = torch.bmm(query, key)
    if options.softcap is not None:
        scores = torch.tanh(scores.div_(options.softcap)).mul_(options.softcap)
    if options.sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        weights = softmax_with_sinks(scores, options.sinks.view(*scores.shape[:2], 1))
    torch.bmm(weights, value, out=output)


def _part_numbers(kv: KvPool) -> dict[int, tuple[int, int]]:
    """Of each layer which of all parts are its keys and its values, in the order of the runs; the
    same one where values are a part of the keys."""
    each = count()
    numbers = {}
    for layer in kv.order:
        if layer not in kv.states:
            key = next(each)
            numbers[layer] = key, key if kv.layers[layer].shared else next(each)
    return numbers


def _seen(first: int, stop: int, window: int | None) -> slice:
    """The positions that queries [first, stop) may see."""
    return slice(first_seen(first, window), stop)


def _matmul(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows @ weight.T by oneDNN where torch has it. rows: [M, K]; weight: [N, K]."""
    if not torch.backends.mkldnn.is_available():
        return torch.nn.functional.linear(rows, weight)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return product
