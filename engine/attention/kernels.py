"""Triton kernels that read the block-first pool in place, and the functions that launch them.

One kernel reads keys and values. Another reads latents with a rotated key, which all heads share.
Both split a sequence's keys among programs, and `_merge` joins the results. `attention.triton`
decides which spans go where. Nothing here waits for the device.
"""
# ruff: noqa: N803  compile-time arguments are written as constants, as in Triton's own kernels

import torch
import triton
import triton.language as tl

from engine.attention.base import AttentionOptions

_TILE = 64  # keys that a program processes at once
_MIN_DOT = 16  # the fewest rows that `tl.dot` accepts
LATENT_ROWS = 16  # heads of a token that share a program over latents, 512 numbers wide
_LATENT_TILE_BYTES = 32 << 10  # of the latents that a program processes at once
_WIDE_ROWS = 64 * 128  # numbers in a program's queries above which it uses eight warps


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(  # type: ignore[no-untyped-def]
    lengths, counts, window, QUERIES: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """How many keys the sequence's first query sees, and the first key and the end of the split.

    The program's axes are (sequence, _, split). Each split takes whole tiles.
    """
    sequence, split = tl.program_id(0), tl.program_id(2)
    length = tl.load(lengths + sequence)
    first_seen = length
    if QUERIES > 1:
        first_seen = length - tl.load(counts + sequence) + 1
    share = tl.cdiv(tl.cdiv(length, TILE), tl.num_programs(2)) * TILE
    low = split * share
    high = tl.minimum(length, low + share)
    if HAS_WINDOW:
        low = tl.maximum(low, tl.maximum(0, first_seen - window) // TILE * TILE)
    return first_seen, low, high


@triton.jit  # type: ignore[untyped-decorator]
def _live(  # type: ignore[no-untyped-def]
    position, there, seen, window, HAS_WINDOW: tl.constexpr
):
    """[ROWS, TILE]: the keys of a tile that each row attends to. `there` marks the keys of the
    split."""
    live = there[None, :] & (position[None, :] < seen[:, None])
    if HAS_WINDOW:
        live = live & (position[None, :] >= seen[:, None] - window)
    return live


@triton.jit  # type: ignore[untyped-decorator]
def _seen(  # type: ignore[no-untyped-def]
    scores, live, softcap, HAS_SOFTCAP: tl.constexpr
):
    """[ROWS, TILE]: the scores for the softmax, minus infinity where `live` is false."""
    if HAS_SOFTCAP:
        scaled = scores / softcap
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scaled) + 1.0))  # tanh
    return tl.where(live, scores, float("-inf"))


@triton.jit
def _weights(scores, maximum):  # type: ignore[no-untyped-def]
    """A tile's exponentials, the factor for the earlier sums, and the maximum so far."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    return tl.exp(scores - base[:, None]), tl.exp(maximum - base), new_maximum


# Arguments that vary between steps of one model. Specializing on them would recompile a kernel, for
# a table of 16 blocks for example, and stop all requests meanwhile. Strides of the pool never vary,
# and specializing on them tells their alignment.
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
    """One program per (sequence, KV head, split): the group's queries over the split's keys.

    Writes the unnormalised output, the maximum score and the sum of exponentials, for `_merge`. It
    has four steps: find its keys, load its queries, loop over tiles of keys with a running softmax,
    write the results. The compiler inlines the functions it calls.
    """
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_seen, low, high = _bounds(lengths, counts, window, QUERIES, TILE, HAS_WINDOW)
    row = tl.arange(0, ROWS)  # the group's heads of the first query, of the second, ...
    seen = first_seen + row // GROUPS  # keys before which each row stops
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
        live = _live(position, there, seen, window, HAS_WINDOW)
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
    """One program per (sequence, tile of its queries' heads, split), over latents with a rotated
    key each.

    Steps and results as in `_paged_kernel`. All heads share the cached rows. A latent is both key
    and value, so it is read once for both.
    """
    sequence, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_seen, low, high = _bounds(lengths, counts, window, QUERIES, TILE, HAS_WINDOW)
    row = tile * ROWS + tl.arange(0, ROWS)  # all heads of the first query, of the second, ...
    real = row < QUERIES * HEADS
    seen = first_seen + row // HEADS  # keys before which each row stops
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
        live = _live(position, there, seen, window, HAS_WINDOW)
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
    """`attend_paged` for a cache of one head, whose values are the first `rank` numbers of its
    keys.

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
    _latent_kernel[(num_sequences, triton.cdiv(rows, LATENT_ROWS), num_splits)](
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
        ROWS=LATENT_ROWS,
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
        else 1,  # not every device has shared memory for more
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
    D]; tables: [S, max_blocks] int32; lengths: [S] int32, the keys that a sequence's last query
    sees, including its own; counts: [S] int32, how many leading queries of a sequence's Q are real
    (not read if Q is 1). `num_splits` programs share each sequence's keys. Returns [S, Q, Hq, D].
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
    """Join splits (axis 2) by a softmax, as FlashDecoding does. partial: [S, Hkv, splits, R, D];
    sinks: [Hkv, 1, R]. Returns [S, Hkv, R, D]."""
    highest = maxima.amax(2, keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks)
    weights = torch.exp(maxima - highest)
    total = (weights * sums).sum(2)
    if sinks is not None:
        total += torch.exp(sinks - highest)[:, :, 0]
    return (weights[..., None] * partial).sum(2) / total[..., None]
