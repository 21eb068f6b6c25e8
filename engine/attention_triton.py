"""Attention on CUDA: decode by a kernel that reads the block-first pool in place.

Same contract as `attention.ReferenceAttention`. Single-token spans of a step go through one launch
per layer; longer spans gather their prefix and use SDPA. Imported only where there is a CUDA
device, or under Triton's interpreter in tests. Engine thread only.
"""
# ruff: noqa: N803  compile-time arguments are written as constants, as in Triton's own kernels

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from engine.attention import AttentionOptions, attend_dense, gather
from engine.batch import Span

_TILE = 64  # keys that a program looks at together
_SPLIT_KEYS = 512  # keys that one program walks over, at least, when a sequence is split
_PROGRAMS = 264  # programs worth launching: two for each of an H100's 132 multiprocessors
_MIN_DOT = 16  # the fewest rows that `tl.dot` multiplies


@triton.jit  # type: ignore[untyped-decorator]
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
    split_keys,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One (sequence, KV head, split): the group's queries over the split's keys.

    Writes the unnormalised output, the maximum score and the sum of exponentials, for `_merge`.
    """
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    low = split * split_keys
    high = tl.minimum(length, low + split_keys)
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
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            scaled = scores / softcap
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scaled) + 1.0))  # tanh
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(maximum - base)
        values = tl.load(at + pool_kv_stride, mask=readable, other=0.0).to(queries.dtype)
        weighted = tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
        output = output * shrink[:, None] + weighted
        total = total * shrink + tl.sum(weights, 1)
        maximum = new_maximum
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
    split_keys: int,
) -> torch.Tensor:
    """One query for each sequence over its keys in the pool, read in place.

    query: [S, Hq, D], last axis contiguous; pool: one layer, [num_blocks, 2, block_size, Hkv, D];
    tables: [S, max_blocks] int32; lengths: [S] int32, keys that each query sees, its own included.
    `num_splits * split_keys` must reach the longest. Returns [S, Hq, D].
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
        split_keys,
        GROUPS=groups,
        ROWS=max(_MIN_DOT, triton.next_power_of_2(groups)),
        DIM=dim,
        PADDED_DIM=max(_MIN_DOT, triton.next_power_of_2(dim)),
        BLOCK_SIZE=pool.shape[2],
        TILE=_TILE,
        HAS_WINDOW=options.window is not None,
        HAS_SOFTCAP=options.softcap is not None,
    )
    return _merge(partial, maxima, sums).view(num_sequences, num_heads, dim).to(query.dtype)


def _merge(partial: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Softmax over splits (axis 2), as FlashDecoding joins them. Returns [S, Hkv, G, D]."""
    weights = torch.exp(maxima - maxima.amax(2, keepdim=True))
    total = (weights * sums).sum(2)
    return (weights[..., None] * partial).sum(2) / total[..., None]


@dataclass(slots=True)
class _Step:
    """A step's index tensors, uploaded once and used by every layer."""

    long: list[tuple[Span, slice]]  # spans of several tokens, with their rows
    single: torch.Tensor  # [S] rows of single-token spans
    tables: torch.Tensor  # [S, max_blocks] int32
    lengths: torch.Tensor  # [S] int32
    num_splits: int
    split_keys: int
    written: torch.Tensor  # [W] rows whose KV is written, and where to:
    blocks: torch.Tensor
    rows: torch.Tensor


class TritonAttention:
    """`PagedAttention` on CUDA. Keeps nothing between steps."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self._step: _Step | None = None

    def begin(self, spans: Sequence[Span]) -> None:
        firsts = np.cumsum([0, *(len(span.tokens) for span in spans)]).tolist()
        long, single, lengths, tables = [], [], [], []
        written, positions, owners = [], [], []
        for span, first in zip(spans, firsts, strict=False):
            count = len(span.tokens)
            if count == 1:
                single.append(first)
                lengths.append(span.start + 1)
                tables.append(span.block_table[: span.start // self._pool.shape[3] + 1])
            else:
                long.append((span, slice(first, first + count)))
            if span.write_kv:
                written.append(np.arange(first, first + count))
                positions.append(np.arange(span.start, span.start + count))
                owners.append(np.asarray(span.block_table))
        block_size = self._pool.shape[3]
        blocks = [o[p // block_size] for o, p in zip(owners, positions, strict=True)]
        padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = table
        num_splits, split_keys = self._splits(len(single), max(lengths, default=1))
        self._step = _Step(
            long,
            self._upload(np.array(single, np.int64)),
            self._upload(padded),
            self._upload(np.array(lengths, np.int32)),
            num_splits,
            split_keys,
            self._upload(_joined(written)),
            self._upload(_joined(blocks)),
            self._upload(_joined(positions) % block_size),
        )

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
        pool = self._pool[:, layer]
        if len(step.written):
            pool[step.blocks, 0, step.rows] = key[step.written].to(pool.dtype)
            pool[step.blocks, 1, step.rows] = value[step.written].to(pool.dtype)
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for span, rows in step.long:
            keys, values = gather(
                self._pool, layer, span.block_table, span.start + len(span.tokens)
            )
            keys, values = keys.to(query.dtype), values.to(query.dtype)
            output[rows] = attend_dense(query[rows], keys, values, span.start, options)
        if len(step.single):
            chosen = query[step.single]
            output[step.single] = decode(
                chosen, pool, step.tables, step.lengths, options, step.num_splits, step.split_keys
            )
        return output

    def finish(self) -> None:
        self._step = None

    def forget(self, sequence_id: int) -> None:
        pass

    def _splits(self, num_sequences: int, longest: int) -> tuple[int, int]:
        """How many programs share a sequence, and the keys of each: enough to fill the device."""
        programs = max(1, num_sequences * self._pool.shape[4])
        wanted = min(-(-_PROGRAMS // programs), -(-longest // _SPLIT_KEYS))
        split_keys = -(-longest // (wanted * _TILE)) * _TILE
        return -(-longest // split_keys), split_keys

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.to(self._pool.device, non_blocking=True)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
