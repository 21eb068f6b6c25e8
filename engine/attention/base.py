"""Paged attention: the function that transformers' modules call, and the reference that defines it.

The model's attention layers call `paged_attention` through transformers' attention interface. It
passes the step's queries, keys and values to the runner's `PagedAttention`, which writes KV to the
pool's blocks and attends over it. Engine thread only.

A query attends only to the pool's contents, in the pool's dtype. A prompt computed cold and one
served from the cache therefore read the same numbers. Fast paths (`attention.cpu`,
`attention.triton`) implement the same protocol and are tested against `ReferenceAttention`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.kv_pool import KvPool, LayerKv
from engine.batch import Span
from engine.errors import ModelError
from tiers.blocks.layout import LayerLayout

IMPLEMENTATION = "cachesvc_paged"  # the name in `config._attn_implementation`
KEPT = "cachesvc_kept"  # the attribute of a module that keeps other than keys and values


class AttentionOptions(NamedTuple):
    """The options of `softmax(cap(q k^T * scaling)) v`, which vary between layers and models.

    With `window` w, position p sees (p - w, p]. `softcap` c turns a score s into c * tanh(s / c).
    `sinks` [Hq] is one more score per head, which takes part in the softmax but has no value. A
    named tuple, because TorchScript takes no dataclass.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionCall(NamedTuple):
    """What one layer attends with in a step.

    query: [T, Hq, Dk]; key: [T, Hkv, Dk]; value: [T, Hkv, Dv]; any strides. If the layer stores no
    separate values, `value` is the leading part of `key`.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: AttentionOptions

    def of(self, rows: slice) -> "AttentionCall":
        """The same for some of the step's rows."""
        return self._replace(query=self.query[rows], key=self.key[rows], value=self.value[rows])


class PagedAttention(Protocol):
    """Attention over the pool, one step at a time.

    A step is `begin`, then `attend` once per layer in order, then `finish`. After a failure the
    next `begin` starts afresh.
    """

    def begin(self, spans: Sequence[Span]) -> None:
        """Begin a step with these spans. Their tokens follow one another along T."""
        ...

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend in one layer. Returns [T, Hq, Dv].

        T may exceed the spans' tokens. The rows beyond are padding, and their result is unused.
        """
        ...

    def finish(self) -> None:
        """End the step after all layers. Afterwards its KV is in the pool."""
        ...

    def forget(self, sequence_id: int) -> None:
        """Drop data derived for a sequence, if there is any."""
        return


# Of a cached prompt's tail, on a GPU: successive queries that read their keys together (with groups
# of 8 heads, 64 rows in registers), and the longest tail read so. A longer one gathers its keys.
TAIL_QUERIES = 8
SHORT_TAIL = 64


class DecodeRows(NamedTuple):
    """A step of S groups of Q successive tokens, each of a sequence with a table, as tensors on the
    device.

    tables: [S, max_blocks]. lengths: [S], with the last token. blocks and rows: [S * Q], where KV
    goes. counts: [S], how many leading tokens of a group are real; None if each is one token.
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor | None = None


class RecordableAttention(PagedAttention, Protocol):
    """Attention whose decode steps a CUDA graph can record."""

    @property
    def in_place(self) -> bool:
        """Whether all of such a step is done on the device, from blocks where they are."""
        ...

    @property
    def sees_its_step(self) -> bool:
        """Whether a row sees what earlier rows of its step write, so that several may be of one
        sequence."""
        ...

    def begin_decode(self, decode: DecodeRows) -> None:
        """Begin a step from tensors that may be refilled before a graph replays it."""
        ...


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' attention modules call. query: [1, Hq, T, D]; returns [1, T,
    Hq, D].

    Raises ModelError for a model that needs more than `AttentionOptions` can express.
    """
    if paged is None:
        raise ModelError(
            f"{type(module).__name__} is not handed the arguments of the model's forward, so that "
            f"paged attention does not reach it"
        )
    refuse_extras(type(module).__name__, attention_mask, extras)
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    layer = module.layer_idx
    assert isinstance(layer, int), layer
    rows = [each[0].transpose(0, 1) for each in (query, key, value)]
    call = AttentionCall(layer, rows[0], rows[1], rows[2], options)
    kept = getattr(module, KEPT, None)
    if kept is not None:
        return kept.attend(paged, call).unsqueeze(0), None
    return paged.attend(call).unsqueeze(0), None


# Arguments that do not change what attention computes.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "is_causal", "output_attentions", "output_router_logits"}
)


def refuse_extras(caller: str, attention_mask: torch.Tensor | None, extras: dict[str, Any]) -> None:
    """Raise ModelError if an argument would change what attention computes."""
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
    """Register `IMPLEMENTATION` with transformers. No mask is registered, so none is built."""
    from transformers import AttentionInterface  # seconds of it, and kernels are tested without

    AttentionInterface.register(IMPLEMENTATION, paged_attention)


class ReferenceAttention(PagedAttention):
    """Plainly correct, on any device: writes the span's KV, gathers the prefix, runs SDPA with a
    mask."""

    def __init__(self, pool: torch.Tensor, layers: Sequence[LayerLayout] = ()) -> None:
        """pool, layers: as `KvPool` takes them."""
        self._pool = KvPool(pool, layers)
        self._spans: Sequence[Span] = ()

    def begin(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    def attend(self, call: AttentionCall) -> torch.Tensor:
        outputs = []
        first = 0
        for span in self._spans:
            rows = slice(first, first + len(span.tokens))
            outputs.append(attend_span(self._pool, span, call.of(rows)))
            first = rows.stop
        padding = call.query[first:]
        outputs.append(padding.new_zeros(*padding.shape[:2], call.value.shape[2]))
        return torch.cat(outputs)  # the last rows are padding

    def finish(self) -> None:
        self._spans = ()


def attend_span(pool: KvPool, span: Span, call: AttentionCall) -> torch.Tensor:
    """Attention of one span, whose rows `call` has."""
    if span.write_kv:
        write_span(pool, span, call)
    end = span.start + len(span.tokens)
    first = first_seen(span.start, call.options.window) // pool.block_size
    key, value = gather(pool, call.layer, span.block_table, end, first)
    dtype, start = call.query.dtype, span.start - first * pool.block_size
    return attend_dense(call.query, key.to(dtype), value.to(dtype), start, call.options)


def first_seen(position: int, window: int | None) -> int:
    """The first position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def write_span(pool: KvPool, span: Span, call: AttentionCall) -> None:
    """Write a span's keys and values of one layer to the blocks of its table."""
    kept, key, value = pool.layers[call.layer], call.key, call.value
    for offset, count, block, row in pieces(span, pool.block_size):
        kept.key[block, row : row + count] = key[offset : offset + count]
        if not kept.shared:
            kept.value[block, row : row + count] = value[offset : offset + count]


def pieces(span: Span, block_size: int) -> list[tuple[int, int, int, int]]:
    """A span cut at block boundaries: (offset in the span, tokens, block, first row in the
    block)."""
    cut = []
    offset, total = 0, len(span.tokens)
    while offset < total:
        number, row = divmod(span.start + offset, block_size)
        count = min(block_size - row, total - offset)
        cut.append((offset, count, span.block_table[number], row))
        offset += count
    return cut


def gather(
    pool: KvPool, layer: int, block_table: Sequence[int], num_tokens: int, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's keys and values of positions [0, num_tokens), without the `first` blocks, which
    no query sees: [N, Hkv, Dk or Dv]."""
    num_blocks = -(-num_tokens // pool.block_size)
    table = torch.tensor(block_table[first:num_blocks], device=pool.tensor.device)
    return gather_blocks(pool.layers[layer], table, num_tokens - first * pool.block_size)


def gather_blocks(
    kept: LayerKv, table: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a table on the device that names only the blocks needed."""
    key = kept.key.index_select(0, table).flatten(0, 1)[:num_tokens]
    if kept.shared:
        return key, key[..., : kept.value.shape[-1]]
    return key, kept.value.index_select(0, table).flatten(0, 1)[:num_tokens]


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Causal attention of positions [start, start + T) over [0, N), N = start + T.

    query: [T, Hq, Dk]; key: [N, Hkv, Dk]; value: [N, Hkv, Dv]. Returns [T, Hq, Dv].
    """
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = _widened(key, groups), _widened(value, groups)  # [Hq, N, Dk or Dv]
    mask = causal_mask(query.shape[0], start, options.window, query.device)
    if options.softcap is None and options.sinks is None:
        output = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            wide_key[None],
            wide_value[None],
            attn_mask=mask,
            scale=options.scaling,
        )[0]
    else:
        scores = query.transpose(0, 1) @ wide_key.transpose(1, 2) * options.scaling
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        sinks = None if options.sinks is None else options.sinks[:, None, None]
        output = softmax_with_sinks(scores, sinks).to(query.dtype) @ wide_value
    return output.transpose(0, 1)


def _widened(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """[N, Hkv, D] as [Hkv * groups, N, D]. A single head is not copied."""
    heads = rows.transpose(0, 1)
    return heads.expand(groups, -1, -1) if len(heads) == 1 else heads.repeat_interleave(groups, 0)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis in float32. A sink, [..., 1, 1] or None, takes its share first.

    It stands before the scores, so that how many follow does not change the order of the sum."""
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32)
    sink = sinks.to(scores.dtype).expand_as(scores[..., :1])
    return torch.softmax(torch.cat([sink, scores], -1), -1, dtype=torch.float32)[..., 1:]


def causal_mask(
    num_queries: int, start: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[T, start + T]: True if the query at start + i may see position j."""
    query = torch.arange(start, start + num_queries, device=device)[:, None]
    position = torch.arange(start + num_queries, device=device)[None]
    seen = position <= query
    return seen if window is None else seen & (position > query - window)
