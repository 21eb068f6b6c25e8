"""Triton kernels that read the block-first pool in place, and the functions that launch them.

One kernel reads keys and values, or latents with a rotated key, which all heads share. A sequence's
keys are cut into pieces (`attention.pieces`), whose results another kernel joins.
`attention.tiling` decides how much a program takes at once, `attention.triton` which spans go
where. Nothing here waits for the device.
"""
# ruff: noqa: N803  compile-time arguments are written as constants, as in Triton's own kernels

from typing import Any

import torch
import triton
import triton.language as tl

from engine.attention.base import AttentionOptions
from engine.attention.pieces import PagedKeys
from engine.attention.tiling import padded, tiling

_MERGED = 2048  # numbers of the output that a merging program takes at once


@triton.jit  # type: ignore[untyped-decorator]
def _live(  # type: ignore[no-untyped-def]
    position, there, seen, window, HAS_WINDOW: tl.constexpr
):
    """[ROWS, TILE]: the keys of a tile that each row attends to. `there` marks the keys of the
    piece."""
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
    pieces,
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
    ROTATED: tl.constexpr,
    PADDED_ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One program per (piece of a sequence, tile of a KV head's rows): some of the queries of the
    head's group over the piece's keys.

    Without ROTATED, keys and values are DIM wide. With it, a latent of DIM numbers is both key and
    value, so it is read once for both, and ROTATED numbers more belong to the key.

    Writes the unnormalised output, the maximum score and the sum of exponentials, to be merged. It
    has four steps: find its keys, load its queries, loop over tiles of keys with a running softmax,
    write the results. The compiler inlines the functions it calls.
    """
    piece = tl.program_id(0)
    sequence = tl.load(pieces + piece)
    low = tl.load(pieces + tl.num_programs(0) + piece)
    high = tl.load(pieces + 2 * tl.num_programs(0) + piece)
    num_tiles: tl.constexpr = (QUERIES * GROUPS + ROWS - 1) // ROWS
    head, tile = tl.program_id(1) // num_tiles, tl.program_id(1) % num_tiles
    first_seen = tl.load(lengths + sequence)  # how many keys the sequence's first query sees
    if QUERIES > 1:
        first_seen = first_seen - tl.load(counts + sequence) + 1
    row = tile * ROWS + tl.arange(0, ROWS)  # the group's heads of the first query, of the second...
    real = row < QUERIES * GROUPS
    seen = first_seen + row // GROUPS  # keys before which each row stops
    dim, turn = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_ROTATED)
    inside = real[:, None] & (dim < DIM)[None, :]
    query_at = query + sequence * query_sequence_stride + head * GROUPS * query_head_stride
    query_at += row // GROUPS * query_row_stride + row % GROUPS * query_head_stride
    queries = tl.load(query_at[:, None] + dim[None, :], mask=inside, other=0.0)
    turned = queries
    if ROTATED:
        turned = tl.load(
            query_at[:, None] + DIM + turn[None, :],
            mask=real[:, None] & (turn < ROTATED)[None, :],
            other=0.0,
        )
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
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        values = keys
        if ROTATED:
            rotated = tl.load(
                key_at[:, None] + DIM + turn[None, :],
                mask=there[:, None] & (turn < ROTATED)[None, :],
                other=0.0,
            ).to(queries.dtype)
            scores += tl.dot(turned, tl.trans(rotated), input_precision="ieee")
        scores = _seen(scores * scaling, live, softcap, HAS_SOFTCAP)
        weights, shrink, maximum = _weights(scores, maximum)
        if not ROTATED:
            values = tl.load(at + pool_kv_stride, mask=readable, other=0.0).to(queries.dtype)
        weighted = tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
        output = output * shrink[:, None] + weighted
        total = total * shrink + tl.sum(weights, 1)
    to = (piece * (tl.num_programs(1) // num_tiles) + head) * QUERIES * GROUPS + row
    tl.store(partial + to[:, None] * DIM + dim[None, :], output, mask=inside)
    tl.store(maxima + to, maximum, mask=real)
    tl.store(sums + to, total, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial,
    maxima,
    sums,
    firsts,
    sinks,
    output,
    QUERIES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Joins a sequence's pieces by a softmax, as FlashDecoding does. One program per (sequence, KV
    head, tile of its rows)."""
    sequence, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = row < QUERIES * GROUPS
    dim = tl.arange(0, PADDED_DIM)
    inside = real[:, None] & (dim < DIM)[None, :]
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    joined = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks + head * GROUPS + row % GROUPS).to(tl.float32)
        total += 1.0
    for piece in range(tl.load(firsts + sequence), tl.load(firsts + sequence + 1)):
        at = (piece * num_heads + head) * QUERIES * GROUPS + row
        maximum = tl.load(maxima + at, mask=real, other=float("-inf"))
        higher = tl.maximum(highest, maximum)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, grow = tl.exp(highest - base), tl.exp(maximum - base)
        there = tl.load(partial + at[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
        joined = joined * shrink[:, None] + there * grow[:, None]
        total = total * shrink + tl.load(sums + at, mask=real, other=0.0) * grow
        highest = higher
    to = (sequence * QUERIES + row // GROUPS) * num_heads * GROUPS + head * GROUPS + row % GROUPS
    joined = joined / tl.where(real, total, 1.0)[:, None]
    tl.store(output + to[:, None] * DIM + dim[None, :], joined, mask=inside)


def constants(
    num_queries: int,
    groups: int,
    dim: int,
    itemsize: int,
    options: AttentionOptions,
    *,
    block_size: int,
    capability: tuple[int, int],
    rotated: int = 0,
) -> dict[str, Any]:
    """The kernel's compile-time arguments, and those of its compiler, for heads of `dim` numbers
    in a query of `itemsize` bytes each."""
    latent = rotated > 0
    fit = tiling(num_queries * groups, dim, itemsize, capability=capability, latent=latent)
    return {
        "QUERIES": num_queries,
        "GROUPS": groups,
        "ROWS": fit.rows,
        "DIM": dim,
        "PADDED_DIM": padded(dim),
        "ROTATED": rotated,
        "PADDED_ROTATED": padded(max(1, rotated)),
        "BLOCK_SIZE": block_size,
        "TILE": fit.tile,
        "HAS_WINDOW": options.window is not None,
        "HAS_SOFTCAP": options.softcap is not None,
        "num_warps": fit.num_warps,
        "num_stages": fit.num_stages,
    }


def attend_paged(
    query: torch.Tensor,
    pool: torch.Tensor,
    keys: PagedKeys,
    options: AttentionOptions,
    *,
    rank: int | None = None,
) -> torch.Tensor:
    """A few successive queries for each sequence over its keys in the pool, read in place.

    query: [S, Q, Hq, D], last axis contiguous; pool: one layer, [num_blocks, 2, block_size, Hkv,
    D]. Returns [S, Q, Hq, D].

    With `rank`, the layer is [num_blocks, 1, block_size, 1, D], whose values are the first `rank`
    numbers of its keys. Returns [S, Q, Hq, rank].
    """
    num_sequences, num_queries, num_heads, dim = query.shape
    num_kv_heads = pool.shape[3]
    groups = num_heads // num_kv_heads
    wide = dim if rank is None else rank
    chosen = constants(
        num_queries,
        groups,
        wide,
        query.dtype.itemsize,
        options,
        block_size=pool.shape[2],
        capability=capability_of(query.device),
        rotated=dim - wide,
    )
    num_programs = num_kv_heads * triton.cdiv(num_queries * groups, chosen["ROWS"])
    pieces = keys.cut(num_programs, options.window)
    shape = (len(pieces.rows[0]), num_kv_heads, num_queries * groups)
    partial = torch.empty((*shape, wide), dtype=torch.float32, device=query.device)
    maxima = torch.empty(shape, dtype=torch.float32, device=query.device)
    sums = torch.empty_like(maxima)
    _paged_kernel[(shape[0], num_programs)](
        query,
        pool,
        keys.tables,
        pieces.rows,
        keys.lengths,
        keys.lengths if keys.counts is None else keys.counts,
        partial,
        maxima,
        sums,
        options.scaling,
        options.window or 0,
        options.softcap or 1.0,
        *query.stride()[:3],
        *pool.stride()[:4],
        keys.tables.stride(0),
        **chosen,
    )
    output = query.new_empty(num_sequences, num_queries, num_heads, wide)
    merging = merge_constants(num_queries, groups, wide, sinks=options.sinks is not None)
    num_tiles = triton.cdiv(num_queries * groups, merging["ROWS"])
    _merge_kernel[(num_sequences, num_kv_heads, num_tiles)](
        partial,
        maxima,
        sums,
        pieces.firsts,
        maxima if options.sinks is None else options.sinks,
        output,
        **merging,
    )
    return output


def merge_constants(num_queries: int, groups: int, dim: int, *, sinks: bool) -> dict[str, Any]:
    """The merging kernel's compile-time arguments."""
    return {
        "QUERIES": num_queries,
        "GROUPS": groups,
        "ROWS": min(padded(num_queries * groups), max(1, _MERGED // padded(dim))),
        "DIM": dim,
        "PADDED_DIM": padded(dim),
        "HAS_SINKS": sinks,
    }


def capability_of(device: torch.device) -> tuple[int, int]:
    """The generation of a GPU; in the interpreter, one that the usual tiling fits."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
