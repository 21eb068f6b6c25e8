"""Attention on CUDA by a kernel that reads the block-first pool in place.

Same contract as `attention.ReferenceAttention`. The kernels are in `attention.kernels`. A step's
single-token spans share one launch per layer. So do its spans of up to 64 tokens. These are tails
of cached prompts, which would otherwise gather and widen a prefix of any length. Longer spans
gather their prefix and use SDPA. Nothing here waits for the device. Imported only with a CUDA
device, or under Triton's interpreter in tests. Engine thread only.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.base import (
    SHORT_TAIL,
    TAIL_QUERIES,
    AttentionCall,
    AttentionOptions,
    DecodeRows,
    PagedAttention,
    attend_dense,
    first_seen,
    gather_blocks,
)
from engine.attention.kernels import attend_paged
from engine.attention.kv_pool import KvPool
from engine.attention.pieces import PagedKeys
from engine.batch import Span
from engine.hardware import upload
from tiers.blocks.layout import LayerLayout

logger = logging.getLogger(__name__)

_TILE_SCORES = 32 << 20  # computed at once if no kernel fits: with what becomes of them, 0.6 GB


@dataclass(slots=True)
class _Launch:
    """One kernel launch: S groups of Q successive queries, padded if there are fewer."""

    num_queries: int  # Q
    queries: torch.Tensor | None  # [S * Q] rows of the step; None if they are all, in order
    kept: torch.Tensor | None  # [N] which of them are real; None if all are
    wanted: torch.Tensor | None  # [N] their rows in the step; None with `queries`
    keys: PagedKeys


@dataclass(slots=True)
class _Step:
    """A step's index tensors, uploaded once for all layers."""

    long: list[tuple[Span, slice, torch.Tensor]]  # gathered spans, with their rows and table
    launches: list[_Launch]
    written: torch.Tensor | None  # [W] rows whose KV is written; None if all are, in order
    blocks: torch.Tensor  # [W] their destinations
    rows: torch.Tensor


class TritonAttention(PagedAttention):
    """`RecordableAttention` on CUDA. Stateless between steps."""

    sees_its_step = True  # a layer's rows are written before any is read

    def __init__(self, pool: torch.Tensor, layers: Sequence[LayerLayout] = ()) -> None:
        """pool, layers: as `KvPool` takes them. Layouts that the kernel does not support are
        gathered."""
        self._pool = pool
        self._kv = KvPool(pool, layers)
        # Whether the kernel reads the pool.
        self.in_place = all(layer in self._kv.pages for layer in self._kv.attended)
        self._step: _Step | None = None

    def begin(self, spans: Sequence[Span]) -> None:
        block_size = self._kv.block_size
        firsts = np.cumsum([0, *(len(span.tokens) for span in spans)]).tolist()
        long: list[tuple[Span, slice, torch.Tensor]] = []
        paged: dict[int, list[tuple[Span, int]]] = {1: [], TAIL_QUERIES: []}
        written, positions, owners = [], [], []
        for span, first in zip(spans, firsts, strict=False):
            count = len(span.tokens)
            if self.in_place and count <= SHORT_TAIL:
                paged[1 if count == 1 else TAIL_QUERIES].append((span, first))
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
        """spans: pairs of a span and its first row in the step."""
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
            PagedKeys(
                self._upload(padded),
                self._upload(np.array(lengths, np.int32)),
                None if num_queries == 1 else self._upload(np.array(counts, np.int32)),
            ),
        )

    def begin_decode(self, decode: DecodeRows) -> None:
        num_queries = len(decode.blocks) // len(decode.lengths)
        keys = PagedKeys(decode.tables, decode.lengths, decode.counts)
        launch = _Launch(num_queries, None, None, None, keys)
        self._step = _Step([], [launch], None, decode.blocks, decode.rows)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        step = self._step
        assert step is not None, "attend before begin"
        query, kept = call.query, self._kv.layers[call.layer]
        if len(step.blocks):
            kept.key[step.blocks, step.rows] = self._written(call.key)
            if not kept.shared:
                kept.value[step.blocks, step.rows] = self._written(call.value)
        if step.launches and step.launches[0].wanted is None:
            return self._attend_launch(step.launches[0], call)
        output = query.new_zeros(*query.shape[:2], call.value.shape[2])
        for span, rows, table in step.long:
            output[rows] = self._attend_long(span, table, call.of(rows))
        for launch in step.launches:
            output[launch.wanted] = self._attend_launch(launch, call)
        return output

    def _written(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of the step's rows that enter the pool."""
        assert self._step is not None
        chosen = rows if self._step.written is None else rows[self._step.written]
        return chosen.to(self._pool.dtype)

    def give_up_kernel(self, error: Exception) -> None:
        """Gathers every span from now on: the kernel does not fit this GPU or cannot be built."""
        logger.warning(
            f"the attention kernel cannot be used here, so blocks are gathered and decode steps "
            f"are not recorded, which is slower: {error}"
        )
        self.in_place = False

    def finish(self) -> None:
        self._step = None

    def _attend_launch(self, launch: _Launch, call: AttentionCall) -> torch.Tensor:
        """The launch's rows of the step's: [N, Hq, Dv]."""
        queries = call.query if launch.queries is None else call.query[launch.queries]
        chosen = queries.unflatten(0, (-1, launch.num_queries))
        kept = self._kv.layers[call.layer]
        rank = kept.value.shape[-1] if kept.shared else None
        pages = self._kv.pages[call.layer]
        output = attend_paged(chosen, pages, launch.keys, call.options, rank=rank)
        output = output.flatten(0, 1)
        return output if launch.kept is None else output[launch.kept]

    def _attend_long(self, span: Span, table: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """Attention of one span of several tokens, whose rows `call` has. Returns [T, Hq, Dv]."""
        query, options = call.query, call.options
        kept = self._kv.layers[call.layer]
        first = first_seen(span.start, options.window) // self._kv.block_size
        before = first * self._kv.block_size
        end = span.start + len(span.tokens)
        keys, values = gather_blocks(kept, table[first:], end - before)
        keys, values = keys.to(query.dtype), values.to(query.dtype)
        even = not kept.shared and keys.shape == values.shape
        if not even or options.softcap is not None or options.sinks is not None:
            return _attend_tiled(query, keys, values, span.start - before, options)
        if options == AttentionOptions(options.scaling):
            return _attend_causal(query, keys, values, options.scaling)
        return attend_dense(query, keys, values, span.start - before, options)

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return upload(values, self._pool.device)


def _attend_tiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """`attend_dense`, a few queries at a time. No flash kernel takes caps, sinks, or heads as wide
    as latents, and all scores of a chunk over a long prefix would take gigabytes."""
    tile = max(1, _TILE_SCORES // (query.shape[1] * key.shape[0]))
    outputs = []
    for low in range(0, len(query), tile):
        rows = query[low : low + tile]
        end = start + low + len(rows)
        first = first_seen(start + low, options.window)
        outputs.append(
            attend_dense(rows, key[first:end], value[first:end], start + low - first, options)
        )
    return torch.cat(outputs)


def _attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """`attend_dense` without window and cap. SDPA is told that the mask is the lower right
    triangle, so it uses its flash kernel and builds no mask. query: [T, Hq, D]; key, value: [N,
    Hkv, D]."""
    groups = query.shape[1] // key.shape[1]
    queries, keys, values = (each.transpose(0, 1)[None] for each in (query, key, value))
    grouped = can_use_flash_attention(SDPAParams(queries, keys, values, None, 0.0, False, True))
    if not grouped:  # other kernels take one head of keys for each of queries
        keys, values = (each.repeat_interleave(groups, 1) for each in (keys, values))
    mask = causal_lower_right(query.shape[0], key.shape[0])
    output = scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return output[0].transpose(0, 1)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
