"""Attention on CUDA by a kernel that reads the block-first pool in place.

Same contract as `attention.ReferenceAttention`. One kernel reads keys and values, another latents
with a rotated key, which all heads share. The single-token spans of a step go through one
launch per layer, and so do its spans of up to 64 tokens: tails of cached prompts, which would
otherwise gather and widen a prefix of any length. Longer spans gather their prefix and use SDPA, or
read it in place (`attention.varlen`) where torch can. Nothing here waits for the device. Imported
only where there is a CUDA device, or under Triton's interpreter in tests. Engine thread only.
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
_SHORT = 64  # tokens of a span that the kernel takes; a longer one is worth a gathered prefix
_QUERIES = 8  # of a span that share a program: with 8 heads of a group, 64 rows in registers
_LATENT_ROWS = 16  # heads of a token that share a program over latents, 512 numbers wide
_LATENT_TILE_BYTES = 32 << 10  # of the latents that it looks at together
_WIDE_ROWS = 64 * 128  # numbers of a program's queries beyond which eight warps hold them


@triton.jit  # type: ignore[untyped-decorator]
def _seen(  # type: ignore[no-untyped-def]
    scores, live, softcap, HAS_SOFTCAP: tl.constexpr
):
    """[ROWS, TILE]: scores as the softmax takes them; minus infinity where `live` is false."""
    if HAS_SOFTCAP:
        scaled = scores / softcap
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scaled) + 1.0))  # tanh
    return tl.where(live, scores, float("-inf"))


@triton.jit
def _weights(scores, maximum):  # type: ignore[no-untyped-def]
    """A tile's exponentials, the factor for what was summed before, and the maximum so far."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    return tl.exp(scores - base[:, None]), tl.exp(maximum - base), new_maximum


# What varies between steps of one model: a kernel compiled anew for a table of 16 blocks, say,
# would stop everybody in service. Strides of the pool never vary, and say how they are aligned.
_VARYING = (
    "window",
    "query_sequence_stride",
    "query_row_stride",
    "query_head_stride",
    "table_stride",
)


@triton.jit(do_not_specialize=_VARYING)  # type: ignore[untyped-decorator]
def _paged_kernel(  # type: ignore[no-untyped-def]
    query,
    pool,
    tables,
    lengths,
    counts,
    partial,
    maxima,
    sums,
    scaling,
    window,
    softcap,
    query_sequence_stride,
    query_row_stride,
    query_head_stride,
    pool_block_stride,
    pool_kv_stride,
    pool_row_stride,
    pool_head_stride,
    table_stride,
    QUERIES: tl.constexpr,
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
    count = 1
    if QUERIES > 1:
        count = tl.load(counts + sequence)
    share = tl.cdiv(tl.cdiv(length, TILE), tl.num_programs(2)) * TILE
    low = split * share
    high = tl.minimum(length, low + share)
    if HAS_WINDOW:
        low = tl.maximum(low, tl.maximum(0, length - count + 1 - window) // TILE * TILE)
    row = tl.arange(0, ROWS)  # the group's heads of the first query, of the second, ...
    seen = length - count + 1 + row // GROUPS  # keys before which each row stops
    dim = tl.arange(0, PADDED_DIM)
    inside = (row < QUERIES * GROUPS)[:, None] & (dim < DIM)[None, :]
    query_at = query + sequence * query_sequence_stride + head * GROUPS * query_head_stride
    query_at += row // GROUPS * query_row_stride + row % GROUPS * query_head_stride
    queries = tl.load(query_at[:, None] + dim[None, :], mask=inside, other=0.0)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for first in range(low, high, TILE):
        position = first + tl.arange(0, TILE)
        there = position < high
        live = there[None, :] & (position[None, :] < seen[:, None])
        if HAS_WINDOW:
            live = live & (position[None, :] >= seen[:, None] - window)
        block = tl.load(
            tables + sequence * table_stride + position // BLOCK_SIZE, mask=there, other=0
        )
        key_at = (
            pool
            + block.to(tl.int64) * pool_block_stride
            + (position % BLOCK_SIZE) * pool_row_stride
            + head * pool_head_stride
        )
        at = key_at[:, None] + dim[None, :]
        readable = there[:, None] & (dim < DIM)[None, :]
        keys = tl.load(at, mask=readable, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
        scores = _seen(scores, live, softcap, HAS_SOFTCAP)
        weights, shrink, maximum = _weights(scores, maximum)
        values = tl.load(at + pool_kv_stride, mask=readable, other=0.0).to(queries.dtype)
        weighted = tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
        output = output * shrink[:, None] + weighted
        total = total * shrink + tl.sum(weights, 1)
    program = (sequence * tl.num_programs(1) + head) * tl.num_programs(2) + split
    to = program * QUERIES * GROUPS + row
    tl.store(partial + to[:, None] * DIM + dim[None, :], output, mask=inside)
    tl.store(maxima + to, maximum, mask=row < QUERIES * GROUPS)
    tl.store(sums + to, total, mask=row < QUERIES * GROUPS)


@triton.jit(do_not_specialize=_VARYING)  # type: ignore[untyped-decorator]
def _latent_kernel(  # type: ignore[no-untyped-def]
    query,
    kept,
    tables,
    lengths,
    counts,
    partial,
    maxima,
    sums,
    scaling,
    window,
    softcap,
    query_sequence_stride,
    query_row_stride,
    query_head_stride,
    kept_block_stride,
    kept_row_stride,
    table_stride,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PADDED_ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One (sequence, tile of its queries' heads, split) over latents with a rotated key each.

    Steps and results as in `_paged_kernel`. All heads share what is kept, and a latent is key and
    value at once: it is read once for both.
    """
    sequence, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    count = 1
    if QUERIES > 1:
        count = tl.load(counts + sequence)
    share = tl.cdiv(tl.cdiv(length, TILE), tl.num_programs(2)) * TILE
    low = split * share
    high = tl.minimum(length, low + share)
    if HAS_WINDOW:
        low = tl.maximum(low, tl.maximum(0, length - count + 1 - window) // TILE * TILE)
    row = tile * ROWS + tl.arange(0, ROWS)  # all heads of the first query, of the second, ...
    real = row < QUERIES * HEADS
    seen = length - count + 1 + row // HEADS  # keys before which each row stops
    rank, turn = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROTATED)
    query_at = query + sequence * query_sequence_stride
    query_at += row // HEADS * query_row_stride + row % HEADS * query_head_stride
    inside = real[:, None] & (rank < RANK)[None, :]
    plain = tl.load(query_at[:, None] + rank[None, :], mask=inside, other=0.0)
    turned = tl.load(
        query_at[:, None] + RANK + turn[None, :],
        mask=real[:, None] & (turn < ROTATED)[None, :],
        other=0.0,
    )
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, PADDED_RANK], tl.float32)
    for first in range(low, high, TILE):
        position = first + tl.arange(0, TILE)
        there = position < high
        live = there[None, :] & (position[None, :] < seen[:, None])
        if HAS_WINDOW:
            live = live & (position[None, :] >= seen[:, None] - window)
        block = tl.load(
            tables + sequence * table_stride + position // BLOCK_SIZE, mask=there, other=0
        )
        at = kept + block.to(tl.int64) * kept_block_stride
        at += (position % BLOCK_SIZE) * kept_row_stride
        latents = tl.load(
            at[:, None] + rank[None, :],
            mask=there[:, None] & (rank < RANK)[None, :],
            other=0.0,
        ).to(plain.dtype)
        keys = tl.load(
            at[:, None] + RANK + turn[None, :],
            mask=there[:, None] & (turn < ROTATED)[None, :],
            other=0.0,
        ).to(plain.dtype)
        scores = tl.dot(plain, tl.trans(latents), input_precision="ieee")
        scores += tl.dot(turned, tl.trans(keys), input_precision="ieee")
        scores = _seen(scores * scaling, live, softcap, HAS_SOFTCAP)
        weights, shrink, maximum = _weights(scores, maximum)
        weighted = tl.dot(weights.to(plain.dtype), latents, input_precision="ieee")
        output = output * shrink[:, None] + weighted
        total = total * shrink + tl.sum(weights, 1)
    to = (sequence * tl.num_programs(2) + split) * QUERIES * HEADS + row
    tl.store(partial + to[:, None] * RANK + rank[None, :], output, mask=inside)
    tl.store(maxima + to, maximum, mask=real)
    tl.store(sums + to, total, mask=real)


def attend_latents(
    query: torch.Tensor,
    kept: torch.Tensor,
    rank: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    options: AttentionOptions,
    num_splits: int,
) -> torch.Tensor:
    """`attend_paged` where one head is kept whose values are the first `rank` numbers of its keys.

    query: [S, Q, H, D]; kept: [num_blocks, block_size, 1, D]. Returns [S, Q, H, rank].
    """
    num_sequences, num_queries, num_heads, dim = query.shape
    rows = num_queries * num_heads
    shape = (num_sequences, 1, num_splits, rows)
    partial = torch.empty((*shape, rank), dtype=torch.float32, device=query.device)
    maxima = torch.empty(shape, dtype=torch.float32, device=query.device)
    sums = torch.empty_like(maxima)
    padded_rank = max(_MIN_DOT, triton.next_power_of_2(rank))
    tile = _LATENT_TILE_BYTES // (padded_rank * query.dtype.itemsize)
    _latent_kernel[(num_sequences, triton.cdiv(rows, _LATENT_ROWS), num_splits)](
        query,
        kept,
        tables,
        lengths,
        counts,
        partial,
        maxima,
        sums,
        options.scaling,
        options.window or 0,
        options.softcap or 1.0,
        query.stride(0),
        query.stride(1),
        query.stride(2),
        kept.stride(0),
        kept.stride(1),
        tables.stride(0),
        QUERIES=num_queries,
        HEADS=num_heads,
        ROWS=_LATENT_ROWS,
        RANK=rank,
        PADDED_RANK=padded_rank,
        ROTATED=dim - rank,
        PADDED_ROTATED=max(_MIN_DOT, triton.next_power_of_2(dim - rank)),
        BLOCK_SIZE=kept.shape[1],
        TILE=min(_TILE, max(_MIN_DOT, tile)),
        HAS_WINDOW=options.window is not None,
        HAS_SOFTCAP=options.softcap is not None,
        num_warps=4,
        num_stages=2
        if query.dtype.itemsize == 2
        else 1,  # shared memory for more is not everywhere
    )
    sinks = options.sinks
    if sinks is not None:
        sinks = sinks.float().repeat(num_queries).view(1, 1, rows)
    merged = _merge(partial, maxima, sums, sinks)  # [S, 1, Q * H, rank]
    return merged.view(num_sequences, num_queries, num_heads, rank).to(query.dtype)


def attend_paged(
    query: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    options: AttentionOptions,
    num_splits: int,
) -> torch.Tensor:
    """A few successive queries for each sequence over its keys in the pool, read in place.

    query: [S, Q, Hq, D], last axis contiguous; pool: one layer, [num_blocks, 2, block_size, Hkv,
    D]; tables: [S, max_blocks] int32; lengths: [S] int32, keys that a sequence's last query sees,
    its own included; counts: [S] int32, how many of a sequence's Q queries are real, the first
    ones; not read where Q is 1. Each sequence's keys are cut in `num_splits`, for as many programs.
    Returns [S, Q, Hq, D].
    """
    num_sequences, num_queries, num_heads, dim = query.shape
    num_kv_heads = pool.shape[3]
    groups = num_heads // num_kv_heads
    shape = (num_sequences, num_kv_heads, num_splits, num_queries * groups)
    partial = torch.empty((*shape, dim), dtype=torch.float32, device=query.device)
    maxima = torch.empty(shape, dtype=torch.float32, device=query.device)
    sums = torch.empty_like(maxima)
    _paged_kernel[(num_sequences, num_kv_heads, num_splits)](
        query,
        pool,
        tables,
        lengths,
        counts,
        partial,
        maxima,
        sums,
        options.scaling,
        options.window or 0,
        options.softcap or 1.0,
        query.stride(0),
        query.stride(1),
        query.stride(2),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        pool.stride(3),
        tables.stride(0),
        QUERIES=num_queries,
        GROUPS=groups,
        ROWS=max(_MIN_DOT, triton.next_power_of_2(num_queries * groups)),
        DIM=dim,
        PADDED_DIM=max(_MIN_DOT, triton.next_power_of_2(dim)),
        BLOCK_SIZE=pool.shape[2],
        TILE=_TILE,
        HAS_WINDOW=options.window is not None,
        HAS_SOFTCAP=options.softcap is not None,
        num_warps=8 if num_queries * groups * dim > _WIDE_ROWS else 4,
    )
    sinks = options.sinks
    if sinks is not None:
        sinks = sinks.float().view(num_kv_heads, 1, 1, groups)
        sinks = sinks.expand(num_kv_heads, 1, num_queries, groups).flatten(2)
    merged = _merge(partial, maxima, sums, sinks)  # [S, Hkv, Q * G, D]
    merged = merged.view(num_sequences, num_kv_heads, num_queries, groups, dim).transpose(1, 2)
    return merged.reshape(query.shape).to(query.dtype)


def _merge(
    partial: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Softmax over splits (axis 2), as FlashDecoding joins them. partial: [S, Hkv, splits, R, D];
    sinks: [Hkv, 1, R]. Returns [S, Hkv, R, D]."""
    highest = maxima.amax(2, keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks)
    weights = torch.exp(maxima - highest)
    total = (weights * sums).sum(2)
    if sinks is not None:
        total += torch.exp(sinks - highest)[:, :, 0]
    return (weights[..., None] * partial).sum(2) / total[..., None]


@dataclass(slots=True)
class _Launch:
    """What the kernel computes at once: S groups of Q successive queries, padded where fewer."""

    num_queries: int  # Q
    queries: torch.Tensor  # [S * Q] rows of the step
    kept: torch.Tensor | None  # [N] which of them are real; None for all
    wanted: torch.Tensor  # [N] their rows of the step
    tables: torch.Tensor  # [S, max_blocks] int32
    lengths: torch.Tensor  # [S] int32
    counts: torch.Tensor  # [S] int32
    longest: int  # keys, of all S


@dataclass(slots=True)
class _Step:
    """A step's index tensors, uploaded once and used by every layer."""

    long: list[tuple[Span, slice, torch.Tensor]]  # spans that are gathered, their rows, their table
    launches: list[_Launch]
    written: torch.Tensor  # [W] rows whose KV is written, and where to:
    blocks: torch.Tensor
    rows: torch.Tensor


class TritonAttention:
    """`PagedAttention` on CUDA. Keeps nothing between steps."""

    def __init__(self, pool: torch.Tensor, layers: Sequence[LayerLayout] = ()) -> None:
        """pool, layers: as `KvPool` takes them. What the kernel is not made for is gathered."""
        self._pool = pool
        self._kv = KvPool(pool, layers)
        self._in_place = self._kv.paired or self._kv.latent
        self._varlen = self._kv.paired and varlen_works(pool)
        self._step: _Step | None = None

    def begin(self, spans: Sequence[Span]) -> None:
        block_size = self._kv.block_size
        firsts = np.cumsum([0, *(len(span.tokens) for span in spans)]).tolist()
        long: list[tuple[Span, slice, torch.Tensor]] = []
        paged: dict[int, list[tuple[Span, int]]] = {1: [], _QUERIES: []}
        written, positions, owners = [], [], []
        for span, first in zip(spans, firsts, strict=False):
            count = len(span.tokens)
            if self._in_place and count <= _SHORT:
                paged[1 if count == 1 else _QUERIES].append((span, first))
            else:
                whole = np.array(span.block_table[: -(-(span.start + count) // block_size)])
                long.append((span, slice(first, first + count), self._upload(whole)))
            if span.write_kv:
                written.append(np.arange(first, first + count))
                positions.append(np.arange(span.start, span.start + count))
                owners.append(np.asarray(span.block_table))
        blocks = [o[p // block_size] for o, p in zip(owners, positions, strict=True)]
        self._step = _Step(
            long,
            [self._launch(some, num_queries) for num_queries, some in paged.items() if some],
            self._upload(_joined(written)),
            self._upload(_joined(blocks)),
            self._upload(_joined(positions) % block_size),
        )

    def _launch(self, spans: Sequence[tuple[Span, int]], num_queries: int) -> _Launch:
        """spans: each with its first row in the step."""
        queries, kept, wanted, tables = [], [], [], []
        counts: list[int] = []
        lengths: list[int] = []
        for span, first in spans:
            for offset in range(0, len(span.tokens), num_queries):
                count = min(num_queries, len(span.tokens) - offset)
                rows = first + offset + np.arange(num_queries)
                kept.append(len(counts) * num_queries + np.arange(count))
                wanted.append(rows[:count])
                queries.append(np.minimum(rows, rows[count - 1]))
                counts.append(count)
                lengths.append(span.start + offset + count)
                tables.append(span.block_table[: (lengths[-1] - 1) // self._kv.block_size + 1])
        padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = table
        return _Launch(
            num_queries,
            self._upload(_joined(queries)),
            None if num_queries == 1 else self._upload(_joined(kept)),
            self._upload(_joined(wanted)),
            self._upload(padded),
            self._upload(np.array(lengths, np.int32)),
            self._upload(np.array(counts, np.int32)),
            max(lengths),
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
        launch = _Launch(1, everyone, None, everyone, tables, lengths, lengths, longest)
        self._step = _Step([], [launch], everyone, blocks, rows)

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
        for launch in step.launches:
            output[launch.wanted] = self._attend_launch(layer, launch, query, options)
        return output

    def finish(self) -> None:
        self._step = None

    def forget(self, sequence_id: int) -> None:
        pass

    def _attend_launch(
        self, layer: int, launch: _Launch, query: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """query: [T, Hq, Dk], the step's; returns [N, Hq, Dv], the launch's."""
        chosen = query[launch.queries].unflatten(0, (-1, launch.num_queries))
        told = (launch.tables, launch.lengths, launch.counts, options)
        if self._kv.latent:
            kept = self._kv.layers[layer]
            tiles = triton.cdiv(chosen.shape[1] * chosen.shape[2], _LATENT_ROWS)
            num_splits = _splits(len(chosen) * tiles, launch.longest)
            output = attend_latents(chosen, kept.key, kept.value.shape[-1], *told, num_splits)
        else:
            pool = self._pool[:, self._kv.places[layer]]
            num_splits = _splits(len(chosen) * pool.shape[3], launch.longest)
            output = attend_paged(chosen, pool, *told, num_splits)
        output = output.flatten(0, 1)
        return output if launch.kept is None else output[launch.kept]

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

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return upload(values, self._pool.device)


def _splits(num_programs: int, longest: int) -> int:
    """How many programs share the keys of one: enough to fill the device, each with some work."""
    return min(-(-_PROGRAMS // max(1, num_programs)), -(-longest // _SPLIT_KEYS))


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
