"""Attention over a window and over compressed entries, under one softmax.

(DeepSeek-V4, arXiv 2606.19348, section 2.3.) Beside the keys of its window, such a layer keeps one
*entry* for every `rate` tokens. A compressor makes it of a row for each of these tokens, and, if
entries overlap, of the tokens of the entry before:

    tokens ─► rows (a key and its gate) ─► entry, once its last token is there

A query sees the entries that end at its position or before. With an index, it sees the `top_k` of
them that score highest. The index has a compressor of its own, of the same tokens.

Entries are a layer of the pool with a `rate`, so a block ends where entries do. The rows of an
entry that is still open are a state: a block's last ones are in the pool. Both are in the pool's
dtype, as keys are, so an entry is the same from whichever rows it is made.

Engine thread only.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import nn

from engine.attention.base import (
    KEPT,
    AttentionCall,
    AttentionOptions,
    PagedAttention,
    causal_mask,
    first_seen,
    gather,
    softmax_with_sinks,
    write_span,
)
from engine.attention.kv_pool import KvPool
from engine.attention.sparse import picked
from engine.attention.states import last_rows
from engine.batch import Span
from engine.hardware import upload
from tiers.blocks.layout import LayerLayout

_QUERIES = 32  # attended together on a GPU; on a CPU one, whose bits depend on no other


class Compressor:
    """Makes the entries of a layer, or the keys of its index. `entries` and `rows` are the pool's
    layers where they are kept.

    With `overlaps`, the first half of a row counts for the entry after its own.
    """

    def __init__(self, module: Any, first_layer: int) -> None:
        self.entries, self.rows = first_layer, first_layer + 1
        self.rate, self.size = int(module.compress_rate), int(module.head_dim)
        self._width = module.position_bias.shape[1]
        self.overlaps = self._width == 2 * self.size
        self._module = module
        code = inspect.unwrap(type(module).forward)
        self._rotate: Callable[..., torch.Tensor] = code.__globals__["apply_rotary_pos_emb"]

    def layouts(self, picks: int | None = None) -> dict[int, LayerLayout]:
        """Of its two layers. A state is the rows of the open entry and of the one that overlaps
        it."""
        size, width = self.size, 2 * self._width
        last = self.rate * (2 if self.overlaps else 1)
        return {
            self.entries: LayerLayout(1, size, size, shared=True, picks=picks, rate=self.rate),
            self.rows: LayerLayout(1, width, width, shared=True, window=last, rows=last),
        }

    def rows_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [1, T, C]. Returns [T, 2 * width], keys and gates."""
        own = self._module
        return torch.cat([own.kv_proj(hidden_states), own.gate_proj(hidden_states)], -1)[0]

    def first_row(self, position: int) -> int:
        """The position of the first row of the entry that is open at `position`. Negative for the
        first entry, if entries overlap."""
        return position - position % self.rate - (self.rate if self.overlaps else 0)

    def nothing(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """The rows of `count` positions before the first, which take no part in an entry."""
        rows = like.new_zeros(count, 2 * self._width)
        rows[:, self._width :] = -torch.inf
        return rows

    def made(self, rows: torch.Tensor, position: int) -> torch.Tensor:
        """The entries that end within `rows` [N, 2 * width], which begin at a `first_row`. The
        first entry is that of `position`. Returns [n, size]."""
        num_chunks = len(rows) // self.rate
        chunks = rows[: num_chunks * self.rate].unflatten(0, (num_chunks, self.rate))
        key, gate = chunks.split(self._width, -1)
        gate = gate + self._module.position_bias
        if self.overlaps:
            key, gate = (_overlapping(each, self.size) for each in (key, gate))
        # Along the last axis, because along another a number's bits may depend on its neighbours.
        shares = gate.transpose(1, 2).softmax(-1, dtype=torch.float32).transpose(1, 2)
        entries = self._module.kv_norm((key * shares.to(key.dtype)).sum(1))
        first = position - position % self.rate
        positions = first + self.rate * torch.arange(len(entries), device=rows.device)
        return self.rotated(entries[:, None], positions)[:, 0]

    def rotated(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """rows: [T, H, D]; positions: [T]."""
        own = self._module
        table = own.rotary_emb(rows, position_ids=positions[None], layer_type=own.rope_layer_type)
        return self._rotate(rows.transpose(0, 1)[None], *table)[0].transpose(0, 1)


def _overlapping(chunks: torch.Tensor, size: int) -> torch.Tensor:
    """[n + 1, rate, 2 * size] as [n, 2 * rate, size]: the first half of a chunk before the second
    half of the next."""
    return torch.cat([chunks[:-1, :, :size], chunks[1:, :, size:]], 1)


class EntryIndex(NamedTuple):
    """What an index computes for T tokens. rows: [T, 2 * width], for its keys; query: [T, H, D];
    weights: [T, H], the scale of scores included."""

    compressor: Compressor
    rows: torch.Tensor
    query: torch.Tensor
    weights: torch.Tensor
    top_k: int


class EntryRows(NamedTuple):
    """What a layer computes for T tokens in addition to keys. rows: [T, 2 * width]. `indexed`
    is None if its queries see all entries."""

    compressor: Compressor
    rows: torch.Tensor
    indexed: EntryIndex | None


class PagedEntries(Protocol):
    """What a layer with entries needs in addition to `PagedAttention`."""

    def attend_with(self, call: AttentionCall, step: EntryRows) -> torch.Tensor:
        """`attend`, in a layer whose queries see entries as well."""
        ...


class EntryForward:
    """Replaces the forward of a compressor. It notes what the compressor computes of the step's
    tokens. Making entries takes the rows before, which paged attention has."""

    def __init__(self, module: Any, first_layer: int) -> None:
        self._module = module
        self._compressor = Compressor(module, first_layer)
        index = getattr(module, "indexer", None)
        self._index = None if index is None else Compressor(index, first_layer + 2)
        self.num_layers = 2 if index is None else 4  # of the pool
        self._noted: EntryRows | None = None

    def __call__(
        self,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        """Returns no entries, and no mask over them."""
        index = None
        if self._index is not None:
            own, scorer = self._module.indexer, self._module.indexer.scorer
            query = own.q_b_proj(q_residual)[0].unflatten(-1, (-1, own.head_dim))
            weights = scorer.weights_proj(hidden_states)[0].float()
            index = EntryIndex(
                self._index,
                self._index.rows_of(hidden_states),
                self._index.rotated(query, position_ids[0]),
                weights * (scorer.softmax_scale * scorer.weights_scaling),
                own.index_topk,
            )
        rows = self._compressor.rows_of(hidden_states)
        self._noted = EntryRows(self._compressor, rows, index)
        return hidden_states.new_empty(1, 1, 0, self._compressor.size), None

    def attend(self, paged: PagedAttention, call: AttentionCall) -> torch.Tensor:
        """Attention of the layer, with what the latest call noted."""
        assert self._noted is not None, "the compressor was not asked"
        noted, self._noted = self._noted, None
        return cast(PagedEntries, paged).attend_with(call, noted)


def page_compressors(model: nn.Module, first_layer: int) -> int:
    """Make every compressor leave its entries to paged attention, which keeps them as layers from
    `first_layer` on. Returns how many there are. Cannot be undone."""
    found: list[Any] = [
        module for module in model.modules() if is_compressor(getattr(module, "compressor", None))
    ]
    for module in found:
        entries = EntryForward(module.compressor, first_layer)
        first_layer += entries.num_layers
        module.compressor.forward = entries
        setattr(module, KEPT, entries)
    return len(found)


def is_compressor(module: Any) -> bool:
    """Whether the module makes entries as DeepSeek-V4's compressors do."""
    needed = ("compress_rate", "head_dim", "position_bias", "kv_norm", "rotary_emb")
    return all(hasattr(module, name) for name in needed)


def longest_entry(model: nn.Module) -> int:
    """The most tokens of which a compressor makes an entry; 0 without compressors."""
    found: list[Any] = [module for module in model.modules() if is_compressor(module)]
    return max((int(module.compress_rate) for module in found), default=0)


class SeenEntries(NamedTuple):
    """The entries that T queries see. kept: [num_blocks, rows, D]; table: [B], the sequence's
    blocks; seen: [T, E], for each query whether it sees an entry."""

    kept: torch.Tensor
    table: torch.Tensor
    seen: torch.Tensor


def seen_entries(
    step: EntryRows, own: slice, start: int, keys: torch.Tensor | None
) -> torch.Tensor:
    """`SeenEntries.seen` of the step's rows `own`, the first of which is at position `start`.

    keys: [E, D], those of the index.
    """
    rate, count, device = step.compressor.rate, own.stop - own.start, step.rows.device
    ends = torch.arange(start + 1, start + count + 1, device=device) // rate
    seen = torch.arange((start + count) // rate, device=device) < ends[:, None]
    if step.indexed is None or keys is None:
        return seen
    top_k = step.indexed.top_k
    first = max(0, (top_k + 1) * rate - 1 - start)  # the first to see more than are picked
    if first < count:
        rows = slice(own.start + first, own.stop)
        query, weights = step.indexed.query[rows], step.indexed.weights[rows]
        places = picked(query, weights, keys, start + first, top_k, rate=rate)
        seen[first:] = torch.zeros_like(seen[first:]).scatter_(1, places, True)
    return seen


def attend_entries(
    call: AttentionCall, key: torch.Tensor, start: int, entries: SeenEntries | None
) -> torch.Tensor:
    """Attention of T queries in their window and over entries. key: [N, D]; its row `start` is the
    first query's own. Returns [T, H, Dv]."""
    outputs, window = [], call.options.window
    count = 1 if key.device.type == "cpu" else _QUERIES
    for at in range(0, len(call.query), count):
        query = call.query[at : at + count]
        low, high = first_seen(start + at, window), start + at + len(query)
        keys = key[low:high]
        seen = causal_mask(len(query), start + at - low, window, key.device)
        if entries is not None:
            own, num_rows = entries.seen[at : at + count], entries.kept.shape[1]
            places = own.any(0).nonzero()[:, 0]
            found = entries.kept[entries.table[places // num_rows], places % num_rows]
            keys, seen = torch.cat([keys, found]), torch.cat([seen, own[:, places]], 1)
        outputs.append(_attend_seen(query, keys, seen, call.value.shape[2], call.options))
    return torch.cat(outputs)


def _attend_seen(
    query: torch.Tensor,
    key: torch.Tensor,
    seen: torch.Tensor,
    value_dim: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """query: [T, H, D]; key: [K, D], whose leading part is the value; seen: [T, K]."""
    keys = key.float()
    scores = (query.float() * options.scaling) @ keys.t()
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    sinks = None if options.sinks is None else options.sinks[:, None]
    return (softmax_with_sinks(scores, sinks) @ keys[:, :value_dim]).to(query.dtype)


class CompressedAttention(PagedAttention):
    """`PagedAttention` of a model whose layers attend in a window, some of them to entries as well.

    The rows of open entries enter the pool at the end of a step, so a failed step leaves those from
    which it began.
    """

    def __init__(self, pool: torch.Tensor, layers: Sequence[LayerLayout]) -> None:
        self._kv = KvPool(pool, layers)
        self._spans: list[tuple[Span, slice, torch.Tensor]] = []  # its rows, its block table
        self._computed: dict[int, torch.Tensor] = {}  # by layer of rows, the step's

    def begin(self, spans: Sequence[Span]) -> None:
        self._spans, first = [], 0
        self._computed.clear()
        for span in spans:
            end = first + len(span.tokens)
            table = upload(np.array(span.block_table, np.int64), self._kv.tensor.device)
            self._spans.append((span, slice(first, end), table))
            first = end

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self._attend(call, [None] * len(self._spans))

    def attend_with(self, call: AttentionCall, step: EntryRows) -> torch.Tensor:
        """See `PagedEntries`."""
        self._compress(step.compressor, step.rows)
        if step.indexed is not None:
            self._compress(step.indexed.compressor, step.indexed.rows)
        kept, entries = self._rows(step.compressor.entries), []
        for span, own, table in self._spans:
            keys = None
            if step.indexed is not None:
                num_keys = (span.start + len(span.tokens)) // step.indexed.compressor.rate
                keys = self._gathered(step.indexed.compressor.entries, table, num_keys)
            entries.append(SeenEntries(kept, table, seen_entries(step, own, span.start, keys)))
        return self._attend(call, entries)

    def finish(self) -> None:
        spans = [span for span, _, _ in self._spans]
        for layer, rows in self._computed.items():
            kept = self._rows(layer)
            written = last_rows(spans, self._kv.block_size, kept.shape[1])
            sources, blocks, places = (upload(each, rows.device) for each in written)
            kept[blocks, places] = rows[sources]
        self._spans = []
        self._computed.clear()

    def _attend(self, call: AttentionCall, entries: Sequence[SeenEntries | None]) -> torch.Tensor:
        outputs, done, size = [], 0, self._kv.block_size
        for (span, own, _), seen in zip(self._spans, entries, strict=True):
            if span.write_kv:
                write_span(self._kv, span, call.of(own))
            first = first_seen(span.start, call.options.window) // size
            end = span.start + len(span.tokens)
            key, _ = gather(self._kv, call.layer, span.block_table, end, first)
            outputs.append(attend_entries(call.of(own), key[:, 0], span.start - first * size, seen))
            done = own.stop
        padding = call.query[done:]
        outputs.append(padding.new_zeros(*padding.shape[:2], call.value.shape[2]))
        return torch.cat(outputs)

    def _compress(self, compressor: Compressor, rows: torch.Tensor) -> None:
        """Write the entries that end in this step."""
        kept, entries = self._rows(compressor.rows), self._rows(compressor.entries)
        self._computed[compressor.rows] = rounded = rows.to(kept.dtype)
        for span, own, table in self._spans:
            start, end = span.start, span.start + len(span.tokens)
            ending = torch.arange(
                start // compressor.rate, end // compressor.rate, device=rows.device
            )
            if not span.write_kv or not len(ending):
                continue
            first = compressor.first_row(start)
            before = torch.arange(max(0, first), start, device=rows.device)
            blocks = table[before // self._kv.block_size]
            known = [
                compressor.nothing(max(0, -first), rows),
                kept[blocks, before % kept.shape[1]].to(rows.dtype),
                rounded[own].to(rows.dtype),
            ]
            made = compressor.made(torch.cat(known), start).to(entries.dtype)
            num_rows = entries.shape[1]
            entries[table[ending // num_rows], ending % num_rows] = made

    def _gathered(self, layer: int, table: torch.Tensor, count: int) -> torch.Tensor:
        """A sequence's first rows of a layer with a rate, [count, D]."""
        kept = self._rows(layer)
        num_blocks = -(-count // kept.shape[1])
        return kept.index_select(0, table[:num_blocks]).flatten(0, 1)[:count]

    def _rows(self, layer: int) -> torch.Tensor:
        """A layer's rows in the pool: [num_blocks, rows, D]."""
        return self._kv.layers[layer].key[:, :, 0]
