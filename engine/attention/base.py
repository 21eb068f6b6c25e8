"""Paged attention: what transformers' attention modules call, and the reference that defines it.

The model's attention layers call `paged_attention` through transformers' attention interface. It
hands the step's queries, keys and values to the `PagedAttention` that the runner passed along,
which writes KV to the pool's blocks and attends over what stands there. Engine thread only.

Everything a query attends to is what the pool holds, in the pool's dtype: a prompt computed cold
and one served from the cache read the same numbers. Fast paths (`attention_cpu`,
`attention_triton`) implement the same protocol and are tested against `ReferenceAttention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.batch import Span
from engine.errors import ModelError

IMPLEMENTATION = "cachesvc_paged"  # the name in `config._attn_implementation`


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What varies between layers and models: `softmax(cap(q k^T * scaling)) v`.

    `window` w lets position p see (p - w, p]; `softcap` c turns scores s into c * tanh(s / c).
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None


class PagedAttention(Protocol):
    """Attention over the pool, for the tokens of one step at a time.

    A step is `begin`, then `attend` once per layer in order, then `finish`; after a failure the
    next `begin` starts afresh. `forget` drops whatever was derived for a sequence.
    """

    def begin(self, spans: Sequence[Span]) -> None:
        """Take the step's spans; their tokens lie one after another in T."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """query: [T, Hq, D]; key, value: [T, Hkv, D], any strides. Returns [T, Hq, D].

        T may exceed the spans' tokens; the rows beyond are padding, and their result is unused.
        """
        ...

    def finish(self) -> None:
        """All layers are done: after this the step's KV stands in the pool."""
        ...

    def forget(self, sequence_id: int) -> None: ...


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention modules call. query: [1, Hq, T, D]; returns [1, T, Hq, D].

    Raises ModelError for a model that asks for more than `AttentionOptions` can say.
    """
    refuse_extras(type(module).__name__, attention_mask, extras)
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    layer = module.layer_idx
    assert isinstance(layer, int), layer
    output = paged.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options,
    )
    return output.unsqueeze(0), None


_HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "output_attentions"})


def refuse_extras(caller: str, attention_mask: torch.Tensor | None, extras: dict[str, Any]) -> None:
    """Raise ModelError when an argument would change what attention computes."""
    unknown = sorted(
        name for name, given in extras.items() if given is not None and name not in _HARMLESS
    )
    if attention_mask is not None:
        unknown.append("attention_mask")
    if extras.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        raise ModelError(
            f"{caller} asks attention for {', '.join(unknown)}, which paged attention does not "
            f"support"
        )


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers. No mask is registered, so none is built."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)


class ReferenceAttention:
    """Obviously right, on any device: write the span's KV, gather the prefix, SDPA with a mask."""

    def __init__(self, pool: torch.Tensor) -> None:
        """pool: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""
        self._pool = pool
        self._spans: Sequence[Span] = ()

    def begin(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        outputs = []
        first = 0
        for span in self._spans:
            rows = slice(first, first + len(span.tokens))
            outputs.append(
                attend_span(self._pool, layer, span, query[rows], key[rows], value[rows], options)
            )
            first = rows.stop
        outputs.append(torch.zeros_like(query[first:]))  # padding
        return torch.cat(outputs)

    def finish(self) -> None:
        self._spans = ()

    def forget(self, sequence_id: int) -> None:
        pass


def attend_span(
    pool: torch.Tensor,
    layer: int,
    span: Span,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """One span of one layer. query: [T, Hq, D]; key, value: [T, Hkv, D]. Returns [T, Hq, D]."""
    if span.write_kv:
        write_span(pool, layer, span, key, value)
    end = span.start + len(span.tokens)
    stored_key, stored_value = gather(pool, layer, span.block_table, end)
    return attend_dense(
        query,
        stored_key.to(query.dtype),
        stored_value.to(query.dtype),
        span.start,
        options,
    )


def write_span(
    pool: torch.Tensor, layer: int, span: Span, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Write a span's keys and values ([T, Hkv, D]) of one layer to the blocks of its table."""
    block_size = pool.shape[3]
    for offset, count, block, row in pieces(span, block_size):
        pool[block, layer, 0, row : row + count] = key[offset : offset + count]
        pool[block, layer, 1, row : row + count] = value[offset : offset + count]


def pieces(span: Span, block_size: int) -> list[tuple[int, int, int, int]]:
    """A span cut at block borders: (offset in the span, tokens, block, first row in the block)."""
    cut = []
    offset, total = 0, len(span.tokens)
    while offset < total:
        number, row = divmod(span.start + offset, block_size)
        count = min(block_size - row, total - offset)
        cut.append((offset, count, span.block_table[number], row))
        offset += count
    return cut


def gather(
    pool: torch.Tensor, layer: int, block_table: Sequence[int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions [0, num_tokens) of one layer, each [num_tokens, Hkv, D]."""
    num_blocks = -(-num_tokens // pool.shape[3])
    table = torch.tensor(block_table[:num_blocks], device=pool.device)
    return gather_blocks(pool, layer, table, num_tokens)


def gather_blocks(
    pool: torch.Tensor, layer: int, table: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, of a table that is on the device and names no more blocks than are needed."""
    blocks = pool[:, layer].index_select(0, table)  # [n, 2, block_size, Hkv, D]
    key, value = blocks.transpose(0, 1).flatten(1, 2)[:, :num_tokens]
    return key, value


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Causal attention of positions [start, start + T) over [0, N), N = start + T.

    query: [T, Hq, D]; key, value: [N, Hkv, D]. Returns [T, Hq, D].
    """
    groups = query.shape[1] // key.shape[1]
    wide_key = key.transpose(0, 1).repeat_interleave(groups, 0)  # [Hq, N, D]
    wide_value = value.transpose(0, 1).repeat_interleave(groups, 0)
    mask = causal_mask(query.shape[0], start, options.window, query.device)
    if options.softcap is None:
        output = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            wide_key[None],
            wide_value[None],
            attn_mask=mask,
            scale=options.scaling,
        )[0]
    else:
        scores = query.transpose(0, 1) @ wide_key.transpose(1, 2) * options.scaling
        scores = torch.tanh(scores / options.softcap) * options.softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        output = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ wide_value
    return output.transpose(0, 1)


def causal_mask(
    num_queries: int, start: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[T, start + T], True where the query at start + i may see position j."""
    query = torch.arange(start, start + num_queries, device=device)[:, None]
    position = torch.arange(start + num_queries, device=device)[None]
    seen = position <= query
    return seen if window is None else seen & (position > query - window)
