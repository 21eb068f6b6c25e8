"""Attention on CUDA: decode by a kernel that reads the block-first pool in place.

Same contract as `attention.ReferenceAttention`. Single-token spans of a step go through one launch
per layer; longer spans gather their prefix and use SDPA, or read it in place (`attention_varlen`)
where torch can. Nothing here waits for the device. Imported only where there is a CUDA device, or
under Triton's interpreter in tests. Engine thread only.
"""
# ruff: noqa: N803  compile-time arguments are written as constants, as in Triton's own kernels

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.base import AttentionOptions, attend_dense, first_seen, gather_blocks
from engine.attention.kv_pool import KvPool
from engine.attention.varlen import attend_varlen, can_varlen, varlen_works
from engine.batch import Span
from engine.hardware import upload
from tiers.blocks.layout import LayerLayout

_TILE = 64  # keys that a program looks at together
_SPLIT_KEYS = 512  # keys that one program walks over, at least, when a sequence is split
_PROGRAMS = 264  # programs worth launching: two for each of an H100's 132 multiprocessors
_TILE_SCORES = 64 << 20  # scores computed at once where none of the kernels serves
_MIN_DOT = 16  # the fewest rows that `tl.dot` multiplies


@triton.jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    queries, keys, live, scaling, softcap, HAS_SOFTCAP: tl.constexpr
):
    """[ROWS, TILE]: how much each query minds each key; minus infinity where it may not look."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
    if HAS_SOFTCAP:
        scaled = scores / softcap
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scaled) + 1.0))  # tanh
    return tl.where(live[None, :], scores, float("-inf"))


@triton.jit
def _weights(scores, maximum):  # type: ignore[no-untyped-def]
    """A tile's exponentials, the factor for what was summed before, and the maximum so far."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    return tl.exp(scores - base[:, None]), tl.exp(maximum - base), new_maximum


# What varies between steps of one model: a kernel compiled anew for a table of 16 blocks, say,
# would stop everybody in service. Strides of the pool never vary, and say how they are aligned.
_VARYING = ("window", "query_sequence_stride", "query_head_stride", "table_stride")


@triton.jit(do_not_specialize=_VARYING)  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    query,
    pool,
    tables,
    lengths,
    partial,
    maxima,
    sums,
    scaling,
    window,
    softcap,
    query_sequence_stride,
    query_head_stride,
    pool_block_stride,
    pool_kv_stride,
    pool_row_stride,
    pool_head_stride,
    table_stride,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One (sequence, KV head, split): the group's queries over the split's share of the keys.

    Writes the unnormalised output, the maximum score and the sum of exponentials, for `_merge`.
    Four steps: which keys are its own, its queries, a loop over tiles of keys that keeps a running
    softmax, what it found. What it calls is inlined by the compiler.
    """
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    share = tl.cdiv(tl.cdiv(length, TILE), tl.num_programs(2)) * TILE
    low = split * share
    high = tl.minimum(length, low + share)
    seen_from = 0
    if HAS_WINDOW:
        seen_from = tl.maximum(0, length - window)
        low = tl.maximum(low, seen_from // TILE * TILE)
    group = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    inside = (group < GROUPS)[:, None] & (dim < DIM)[None, :]
    query_at = query + sequence * query_sequence_stride + head * GROUPS * query_head_stride
    queries = tl.load(
        query_at + group[:, None] * query_head_stride + dim[None, :], mask=inside, other=0.0
    )
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for first in range(low, high, TILE):
        position = first + tl.arange(0, TILE)
        live = (position < high) & (position >= seen_from)
        block = tl.load(
            tables + sequence * table_stride + position // BLOCK_SIZE, mask=live, other=0
        )
        row = (
            pool
            + block.to(tl.int64) * pool_block_stride
            + (position % BLOCK_SIZE) * pool_row_stride
            + head * pool_head_stride
        )
        at = row[:, None] + dim[None, :]
        readable = live[:, None] & (dim < DIM)[None, :]
        keys = tl.load(at, mask=readable, other=0.0).to(queries.dtype)
        scores = _scores(queries, keys, live, scaling, softcap, HAS_SOFTCAP)
        weights, shrink, maximum = _weights(scores, maximum)
        values = tl.load(at + pool_kv_stride, mask=readable, other=0.0).to(queries.dtype)
        weighted = tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
        output = output * shrink[:, None] + weighted
        total = total * shrink + tl.sum(weights, 1)
    program = (sequence * tl.num_programs(1) + head) * tl.num_programs(2) + split
    tl.store(
        partial + (program * GROUPS + group[:, None]) * DIM + dim[None, :], output, mask=inside
    )
    tl.store(maxima + program * GROUPS + group, maximum, mask=group < GROUPS)
    tl.store(sums + program * GROUPS + group, total, mask=group < GROUPS)


def decode(
    query: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    options: AttentionOptions,
    num_splits: int,
) -> torch.Tensor:
    """One query for each sequence over its keys in the pool, read in place.

    query: [S, Hq, D], last axis contiguous; pool: one layer, [num_blocks, 2, block_size, Hkv, D];
    tables: [S, max_blocks] int32; lengths: [S] int32, keys that each query sees, its own included.
    Each sequence's keys are cut in `num_splits`, for as many programs. Returns [S, Hq, D].
    """
    num_sequences, num_heads, dim = query.shape
    num_kv_heads = pool.shape[3]
    groups = num_heads // num_kv_heads
    shape = (num_sequences, num_kv_heads, num_splits, groups)
    partial = torch.empty((*shape, dim), dtype=torch.float32, device=query.device)
    maxima = torch.empty(shape, dtype=torch.float32, device=query.device)
    sums = torch.empty_like(maxima)
    _decode_kernel[(num_sequences, num_kv_heads, num_splits)](
        query,
        pool,
        tables,
        lengths,
        partial,
        maxima,
        sums,
        options.scaling,
        options.window or 0,
        options.softcap or 1.0,
        query.stride(0),
        query.stride(1),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        pool.stride(3),
        tables.stride(0),
        GROUPS=groups,
        ROWS=max(_MIN_DOT, triton.next_power_of_2(groups)),
        DIM=dim,
        PADDED_DIM=max(_MIN_DOT, triton.next_power_of_2(dim)),
        BLOCK_SIZE=pool.shape[2],
        TILE=_TILE,
        HAS_WINDOW=options.window is not None,
        HAS_SOFTCAP=options.softcap is not None,
    )
    return (
        _merge(partial, maxima, sums, options.sinks)
        .view(num_sequences, num_heads, dim)
        .to(query.dtype)
    )


def _merge(
    partial: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Softmax over splits (axis 2), as FlashDecoding joins them. Returns [S, Hkv, G, D]."""
    highest = maxima.amax(2, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(maxima.shape[1], 1, maxima.shape[3])
        highest = torch.maximum(highest, sink)
    weights = torch.exp(maxima - highest)
    total = (weights * sums).sum(2)
    if sinks is not None:
        total += torch.exp(sink - highest)[:, :, 0]
    return (weights[..., None] * partial).sum(2) / total[..., None]


@dataclass(slots=True)
class _Step:
    """A step's index tensors, uploaded once and used by every layer."""

    long: list[tuple[Span, slice, torch.Tensor]]  # spans of several tokens, their rows, their table
    single: torch.Tensor  # [S] rows of single-token spans
    tables: torch.Tensor  # [S, max_blocks] int32
    lengths: torch.Tensor  # [S] int32
    num_splits: int
    written: torch.Tensor  # [W] rows whose KV is written, and where to:
    blocks: torch.Tensor
    rows: torch.Tensor


class TritonAttention:
    """`PagedAttention` on CUDA. Keeps nothing between steps."""

    def __init__(self, pool: torch.Tensor, layers: Sequence[LayerLayout] = ()) -> None:
        """pool, layers: as `KvPool` takes them. What the kernel is not made for is gathered."""
        self._pool = pool
        self._kv = KvPool(pool, layers)
        self._varlen = self._kv.paired and varlen_works(pool)
        self._step: _Step | None = None

    def begin(self, spans: Sequence[Span]) -> None:
        block_size = self._kv.block_size
        firsts = np.cumsum([0, *(len(span.tokens) for span in spans)]).tolist()
        long, single, lengths, tables = [], [], [], []
        written, positions, owners = [], [], []
        for span, first in zip(spans, firsts, strict=False):
            count = len(span.tokens)
            if count == 1 and self._kv.paired:
                single.append(first)
                lengths.append(span.start + 1)
                tables.append(span.block_table[: span.start // block_size + 1])
            else:
                whole = np.array(span.block_table[: -(-(span.start + count) // block_size)])
                long.append((span, slice(first, first + count), self._upload(whole)))
            if span.write_kv:
                written.append(np.arange(first, first + count))
                positions.append(np.arange(span.start, span.start + count))
                owners.append(np.asarray(span.block_table))
        blocks = [o[p // block_size] for o, p in zip(owners, positions, strict=True)]
        padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = table
        self._step = _Step(
            long,
            self._upload(np.array(single, np.int64)),
            self._upload(padded),
            self._upload(np.array(lengths, np.int32)),
            self._splits(len(single), max(lengths, default=1)),
            self._upload(_joined(written)),
            self._upload(_joined(blocks)),
            self._upload(_joined(positions) % block_size),
        )

    def begin_decode(
        self,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        blocks: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """A step of one token for each of S sequences, from tensors on the device, for a graph that
        is replayed when they were filled anew. tables: [S, max_blocks]; the others: [S]."""
        everyone = torch.arange(len(lengths), device=lengths.device)
        longest = tables.shape[1] * self._kv.block_size
        num_splits = self._splits(len(lengths), longest)
        self._step = _Step([], everyone, tables, lengths, num_splits, everyone, blocks, rows)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        step = self._step
        assert step is not None, "attend before begin"
        kept = self._kv.layers[layer]
        if len(step.written):
            kept.key[step.blocks, step.rows] = key[step.written].to(self._pool.dtype)
            if not kept.shared:
                kept.value[step.blocks, step.rows] = value[step.written].to(self._pool.dtype)
        output = query.new_zeros(*query.shape[:2], value.shape[2])
        for span, rows, table in step.long:
            output[rows] = self._attend_long(layer, span, table, query[rows], options)
        if len(step.single):
            chosen = query[step.single]
            output[step.single] = decode(
                chosen,
                self._pool[:, self._kv.places[layer]],
                step.tables,
                step.lengths,
                options,
                step.num_splits,
            )
        return output

    def finish(self) -> None:
        self._step = None

    def forget(self, sequence_id: int) -> None:
        pass

    def _attend_long(
        self,
        layer: int,
        span: Span,
        table: torch.Tensor,
        query: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """One span of several tokens. query: [T, Hq, D]; returns the same."""
        if self._varlen and can_varlen(query, self._pool, options):
            return attend_varlen(
                query, self._pool[:, self._kv.places[layer]], table, span.start, options
            )
        first = first_seen(span.start, options.window) // self._kv.block_size
        before = first * self._kv.block_size
        end = span.start + len(span.tokens)
        keys, values = gather_blocks(self._kv.layers[layer], table[first:], end - before)
        keys, values = keys.to(query.dtype), values.to(query.dtype)
        if not self._kv.paired:
            return _attend_tiled(query, keys, values, span.start - before, options)
        if options == AttentionOptions(options.scaling):
            return _attend_causal(query, keys, values, options.scaling)
        return attend_dense(query, keys, values, span.start - before, options)

    def _splits(self, num_sequences: int, longest: int) -> int:
        """How many programs share a sequence: enough to fill the device, each with some work."""
        programs = max(1, num_sequences * self._kv.layers[0].key.shape[2])
        return min(-(-_PROGRAMS // programs), -(-longest // _SPLIT_KEYS))

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return upload(values, self._pool.device)


def _attend_tiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """`attend_dense`, a few queries at a time: no flash kernel takes heads as wide as latents, and
    all scores of a chunk over a long prefix would be gigabytes."""
    tile = max(1, _TILE_SCORES // (query.shape[1] * key.shape[0]))
    outputs = []
    for low in range(0, len(query), tile):
        rows = query[low : low + tile]
        end = start + low + len(rows)
        outputs.append(attend_dense(rows, key[:end], value[:end], start + low, options))
    return torch.cat(outputs)


def _attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """`attend_dense` without window and cap: told that the mask is the lower right triangle, SDPA
    takes its flash kernel and builds none. query: [T, Hq, D]; key, value: [N, Hkv, D]."""
    groups = query.shape[1] // key.shape[1]
    wide_key = key.transpose(0, 1).repeat_interleave(groups, 0)  # [Hq, N, D]
    wide_value = value.transpose(0, 1).repeat_interleave(groups, 0)
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        wide_key[None],
        wide_value[None],
        attn_mask=causal_lower_right(query.shape[0], key.shape[0]),
        scale=scaling,
    )
    return output[0].transpose(0, 1)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
