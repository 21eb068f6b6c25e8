"""Attention on a CPU: a contiguous working copy of each running sequence's KV.

Same contract as `attention.ReferenceAttention`. The pool is block-first, which suits moving blocks
and not reading one layer's keys in a row; so each running sequence has its KV a second time, head
by head, and attention is computed in float32 whatever the model computes in:

    pool   [blocks, parts, block_size, Hkv, D]      the truth, shared, any dtype
    copy   [parts, Hkv, capacity, D]                this sequence's, rebuilt from the pool, float32

for each run of parts of one shape (`KvPool.runs`): most models have one, of all layers' keys and
values.

A copy is filled from the pool when a sequence comes with a prefix already cached, grows with each
step, and is dropped by `forget`. It holds what the pool holds, rounded as the pool rounds. Copies
are bounded in bytes; a sequence without one is served by the reference. Engine thread only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import (
    AttentionOptions,
    attend_span,
    causal_mask,
    first_seen,
    pieces,
    softmax_with_sinks,
)
from engine.attention.kv_pool import KvPool
from engine.batch import Span
from tiers.blocks.layout import LayerLayout

_TILE = 128  # query positions attended at once: scores of a tile stay in the cache

_TILE_ROWS = 2048  # the same, times the query heads that share a key
_CAPACITY_STEP = 256  # tokens by which a copy's capacity is rounded up
DEFAULT_BUDGET_BYTES = 2 << 30


_Layers = dict[int, tuple[torch.Tensor, torch.Tensor]]  # key and value, [Hkv, positions, D]


@dataclass(slots=True)
class _Copy:
    """KV of positions [0, length). `memory` is the flat buffer that the others view."""

    memory: torch.Tensor
    runs: list[torch.Tensor]  # [parts, Hkv, capacity, D]
    length: int = 0

    @property
    def capacity(self) -> int:
        return self.runs[0].shape[2]


@dataclass(slots=True)
class _SpanPart:
    """One span's part of a step: its rows, and views of its copy at the positions that it writes,
    and at all up to its last. Without a copy there are none.

    They are cut for all layers at once: a step of 16 one-token spans calls torch 8,700 times, and
    did so 11,500 times when each layer cut its own.
    """

    span: Span
    rows: slice
    copy: _Copy | None
    written: _Layers
    seen: _Layers


class _Memory:
    """Flat buffers for copies, reused: fresh memory costs as much to touch as a copy to fill.

    Invariant: bytes lent + bytes spare <= budget.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes // torch.float32.itemsize
        self._spare: list[torch.Tensor] = []
        self._held = 0  # elements lent or spare

    @property
    def quarter(self) -> int:
        """A quarter of the budget, in elements."""
        return self._budget // 4

    def take(self, num_elements: int) -> torch.Tensor | None:
        """A buffer of at least `num_elements`, or None where the budget does not allow one."""
        fitting = [memory for memory in self._spare if memory.numel() >= num_elements]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            self._spare = [memory for memory in self._spare if memory is not best]
            return best
        while self._spare and self._held + num_elements > self._budget:
            self._held -= self._spare.pop(0).numel()
        if self._held + num_elements > self._budget:
            return None
        self._held += num_elements
        return torch.empty(num_elements, dtype=torch.float32)

    def give(self, memory: torch.Tensor) -> None:
        self._spare.append(memory)


def _capacity(num_tokens: int) -> int:
    """Room for a sequence of `num_tokens` and an eighth more, so that it is seldom moved."""
    return -(-(num_tokens + num_tokens // 8 + 1) // _CAPACITY_STEP) * _CAPACITY_STEP


class CpuAttention:
    """`PagedAttention` over working copies."""

    def __init__(
        self,
        pool: torch.Tensor,
        layers: Sequence[LayerLayout] = (),
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        """pool, layers: as `KvPool` takes them."""
        self._kv = KvPool(pool, layers)
        self._block_size = self._kv.block_size
        self._token_items = sum(run[0].numel() for run in self._kv.runs) // self._block_size
        self._memory = _Memory(budget_bytes)
        self._copies: dict[int, _Copy] = {}
        self._step: list[_SpanPart] = []
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._triangles: dict[int, torch.Tensor] = {}

    def begin(self, spans: Sequence[Span]) -> None:
        running = {span.sequence_id for span in spans}
        self._step = []
        first = 0
        for span in spans:
            rows = slice(first, first + len(span.tokens))
            self._step.append(self._part(span, rows, self._copy_for(span, running)))
            first = rows.stop

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
            span, rows = part.span, part.rows
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
            if part.copy is None:
                continue
            if part.span.write_kv:
                self._write(part.copy, part.span)
            part.copy.length = part.span.start + len(part.span.tokens)
        self._step = []

    def forget(self, sequence_id: int) -> None:
        copy = self._copies.pop(sequence_id, None)
        if copy is not None:
            self._memory.give(copy.memory)

    def warm_up(self, num_tokens: int) -> None:
        """Touch the memory of a copy of `num_tokens`, or as much of it as a quarter of the budget.

        Memory that a virtual machine touches for the first time comes at about 1 GB/s, slower than
        a prefix is copied from the pool (docs/measurements).
        """
        memory = self._memory.take(
            min(_capacity(num_tokens) * self._token_items, self._memory.quarter)
        )
        if memory is not None:
            self._memory.give(memory.zero_())

    # Working copies.

    def _copy_for(self, span: Span, running: set[int]) -> _Copy | None:
        """The span's copy, holding every position that stands in the pool before this step."""
        end = span.start + len(span.tokens)
        copy = self._copies.get(span.sequence_id)
        if copy is None or copy.capacity < end:
            copy = self._grown(span, copy, running)
            if copy is None:
                return None
        standing = span.start if span.write_kv else end
        if copy.length < standing:
            self._fill(copy, span.block_table, standing)
        copy.length = standing  # what a step that failed half-way left beyond is written anew
        return copy

    def _grown(self, span: Span, old: _Copy | None, running: set[int]) -> _Copy | None:
        """A copy with room for the span and what will follow; `old`'s contents move over."""
        capacity = _capacity(max(span.start + len(span.tokens), span.num_prompt_tokens))
        memory = self._take(capacity * self._token_items, running)
        if memory is None:
            self.forget(span.sequence_id)
            return None
        copy = self._view(memory, capacity)
        if old is not None:
            for new, before in zip(copy.runs, old.runs, strict=True):
                new[:, :, : old.length] = before[:, :, : old.length]
            copy.length = old.length
            self._memory.give(old.memory)
        self._copies[span.sequence_id] = copy
        return copy

    def _view(self, memory: torch.Tensor, capacity: int) -> _Copy:
        runs, start = [], 0
        for run in self._kv.runs:
            _, parts, _, heads, dim = run.shape
            end = start + parts * heads * capacity * dim
            runs.append(memory[start:end].view(parts, heads, capacity, dim))
            start = end
        return _Copy(memory, runs)

    def _part(self, span: Span, rows: slice, copy: _Copy | None) -> _SpanPart:
        if copy is None:
            return _SpanPart(span, rows, None, {}, {})
        end = span.start + len(span.tokens)
        written = [run[:, :, span.start : end] for run in copy.runs] if span.write_kv else []
        seen = [run[:, :, :end] for run in copy.runs]
        return _SpanPart(span, rows, copy, self._by_layer(written), self._by_layer(seen))

    def _by_layer(self, runs: Sequence[torch.Tensor]) -> _Layers:
        """The parts of `runs` [parts, Hkv, positions, D], by the layers that they belong to."""
        if not runs:
            return {}
        each = iter(part for run in runs for part in run)
        layers = {}
        for number in self._kv.order:
            if number in self._kv.states:
                continue
            kept = self._kv.layers[number]
            key = next(each)
            value = key[..., : kept.value.shape[3]] if kept.shared else next(each)
            layers[number] = key, value
        return layers

    def _take(self, num_elements: int, running: set[int]) -> torch.Tensor | None:
        """Memory for a copy; where there is none, copies that this step does not need go first."""
        memory = self._memory.take(num_elements)
        for sequence_id in [known for known in self._copies if known not in running]:
            if memory is not None:
                break
            self.forget(sequence_id)
            memory = self._memory.take(num_elements)
        return memory

    def _fill(self, copy: _Copy, block_table: Sequence[int], end: int) -> None:
        """Bring positions [copy.length, end) over from the pool, as far as windows reach."""
        for to, run, window in zip(copy.runs, self._kv.runs, self._kv.windows, strict=True):
            position = copy.length if window is None else max(copy.length, end - window)
            while position < end:
                number, row = divmod(position, self._block_size)
                count = min(self._block_size - row, end - position)
                rows = run[block_table[number], :, row : row + count]  # [parts, n, Hkv, D]
                to[:, :, position : position + count] = rows.transpose(1, 2)
                position += count

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

    def _write(self, copy: _Copy, span: Span) -> None:
        for offset, count, block, row in pieces(span, self._block_size):
            position = span.start + offset
            for run, rows in zip(self._kv.runs, copy.runs, strict=True):
                there = rows[:, :, position : position + count]  # [parts, Hkv, n, D]
                run[block, :, row : row + count] = there.transpose(1, 2)

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
            attend_one(query, key, value, start, options, output)
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


def attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: int,
    options: AttentionOptions,
    output: torch.Tensor,
) -> None:
    """One scaled query [1, Hq, Dk] at `position` over [Hkv, position + 1, D]; a group's heads share
    a GEMM."""
    if low := first_seen(position, options.window):
        key, value = key[:, low:], value[:, low:]
    scores = torch.bmm(query.view(key.shape[0], -1, query.shape[2]), key.transpose(1, 2))
    if options.softcap is not None:
        scores = torch.tanh(scores.div_(options.softcap)).mul_(options.softcap)
    if options.sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        weights = softmax_with_sinks(scores, options.sinks.view(*scores.shape[:2], 1))
    torch.bmm(weights, value, out=output.view(*scores.shape[:2], -1))


def _seen(first: int, stop: int, window: int | None) -> slice:
    """The positions that queries [first, stop) may see."""
    return slice(first_seen(first, window), stop)


def _matmul(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows @ weight.T by oneDNN where torch has it. rows: [M, K]; weight: [N, K]."""
    if not torch.backends.mkldnn.is_available():
        return torch.nn.functional.linear(rows, weight)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return product
