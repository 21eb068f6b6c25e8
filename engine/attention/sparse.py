"""Sparse attention over latents: a query attends to the keys that an index picks for it.

(DeepSeek-V3.2, arXiv 2512.02556, section 2.1.) Beside its latent, each token has a small index key.
A query scores all index keys up to its own, and attends to the latents of the `top_k` best. Up to
position `top_k` that is all of them, and the attention beneath computes it.

    index  I(q, k) = sum over heads h of w_h * relu(q_h . k)

Index keys are in the pool, as layers that nothing attends to. They stand after the layers of
latents. A layer without an index of its own takes what the last one before it picked.

Of equal scores at the border, the first keys are picked. transformers leaves this to `topk`, which
picks others in a longer row, and so differs between a whole prompt and a continued one.

Engine thread only.
"""

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.nn.functional import pad

from engine.attention.agreement import needs_onednn
from engine.attention.base import (
    AttentionCall,
    AttentionOptions,
    PagedAttention,
    gather,
    pieces,
    softmax_with_sinks,
    write_span,
)
from engine.attention.dense import onednn_product, padded_keys, padded_rows
from engine.attention.kv_pool import KvPool
from engine.batch import Span
from engine.errors import ModelError
from tiers.blocks.layout import LayerLayout

_SCORES = 1 << 24  # numbers in the scores of one tile of queries, over all heads
_QUERIES = 32  # attended together on a GPU; on a CPU one, whose bits depend on no other
# Indexes that rotate the last numbers of a head. The others rotate the first.
_ROTATED_LAST = frozenset({"HYV4Indexer"})


class IndexRows(NamedTuple):
    """What an index computes for T tokens. query: [T, H, D]; key: [T, D]; weights: [T, H], the
    scale of scores included."""

    query: torch.Tensor
    key: torch.Tensor
    weights: torch.Tensor
    top_k: int


class PagedIndex(Protocol):
    """What an index needs in addition to `PagedAttention`."""

    def pick(self, layer: int, rows: IndexRows) -> None:
        """Keep the index keys of the step's tokens, and pick the keys that they attend to, in this
        and later layers. `layer` is the pool's layer of the index keys."""
        ...


class IndexForward:
    """Replaces the forward of an index module. It notes what the index computes of the step's
    tokens. Picking takes the keys of the tokens before, which paged attention has."""

    def __init__(self, module: Any, layer: int) -> None:
        self.layer = layer
        self._module = module
        self._rotate = _rotation(module)
        self._rows: IndexRows | None = None

    def __call__(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        own, (cos, sin) = self._module, position_embeddings
        num_heads, dim, rotated = own.n_heads, own.head_dim, own.qk_rope_head_dim
        query = own.wq_b(q_resid).unflatten(-1, (num_heads, dim))
        key = own.k_norm(own.wk(hidden_states).to(own.k_norm.weight.dtype)).to(hidden_states.dtype)
        first = dim - rotated if type(own).__name__ in _ROTATED_LAST else 0
        ends = [first, rotated, dim - rotated - first]
        before, turning, after = zip(
            query.split(ends, -1), key.unsqueeze(2).split(ends, -1), strict=True
        )
        turned = self._rotate(*turning, cos, sin, unsqueeze_dim=2)
        query, key = (torch.cat(parts, -1)[0] for parts in zip(before, turned, after, strict=True))
        weights = own.weights_proj(hidden_states.to(own.weights_proj.weight.dtype))[0].float()
        scale = num_heads**-0.5 * own.softmax_scale
        self._rows = IndexRows(query, key[:, 0], weights * scale, own.index_topk)
        return hidden_states.new_empty(0, dtype=torch.int32)

    def take(self) -> IndexRows:
        """What the latest call noted."""
        assert self._rows is not None, "the index was not asked"
        rows, self._rows = self._rows, None
        return rows


def page_index(attention: Any, layer: int) -> IndexForward:
    """Make the index of an attention module leave picking to paged attention, which keeps its keys
    as layer `layer`. Raises ModelError for an index of another kind."""
    index = attention.indexer
    index.forward = IndexForward(index, layer)
    # The module's own forward cuts a piece from its mask for the index. No mask is built.
    attention.register_forward_pre_hook(_with_empty_mask, with_kwargs=True)
    return cast(IndexForward, index.forward)


def _with_empty_mask(
    _: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, {**named, "attention_mask": torch.empty(1, 1, 0, 0)}


def _rotation(module: Any) -> Callable[..., Sequence[torch.Tensor]]:
    """The function by which the module's own forward rotates queries and keys. Raises ModelError
    for an index of another kind."""
    needed = ("wq_b", "wk", "k_norm", "weights_proj", "index_topk", "qk_rope_head_dim")
    code = inspect.unwrap(type(module).forward)
    given = list(inspect.signature(code).parameters)[1:4]
    names = [name for name in code.__code__.co_names if name.startswith("apply_rotary_pos_emb")]
    known = all(hasattr(module, name) for name in needed) and len(names) == 1
    if not known or given != ["hidden_states", "q_resid", "position_embeddings"]:
        raise other_index(module)
    rotate: Callable[..., Sequence[torch.Tensor]] = code.__globals__[names[0]]
    return rotate


@dataclass(slots=True)
class _SparsePart:
    """The tokens of a span that do not attend to all keys: rows `[first, end)` of the step, from
    `position` on. `blocks` and `rows` are where the keys are that each picked, [n, top_k]."""

    span: Span
    first: int
    end: int
    position: int
    blocks: torch.Tensor | None = None
    rows: torch.Tensor | None = None


def other_index(module: Any) -> ModelError:
    """The refusal of an index of another kind."""
    return ModelError(
        f"{type(module).__name__} does not pick single latents as DeepSeek-V3.2's sparse index "
        f"does, and is not supported"
    )


def check_layers(kind: str, picked: Mapping[int, bool], windows: Container[int]) -> None:
    """Raise ModelError if an index picks for some layers (`picked`) and others have no window."""
    if any(picked.values()) and any(is_picked == (n in windows) for n, is_picked in picked.items()):
        raise ModelError(
            f"{kind} has a sparse index in some layers, and others that attend to all tokens, "
            f"which is not supported"
        )


def indexed_layers(layers: Sequence[LayerLayout]) -> tuple[set[int], set[int]]:
    """Of a model with a sparse index, the layers that attend to what it picks, and the others. The
    probe sees to it that these are the ones with a window. Both are empty without an index, or if
    it picks entries (`attention.compressed`)."""
    if all(layer.picks is None or layer.rate > 1 for layer in layers):
        return set(), set()
    attending = [number for number, layer in enumerate(layers) if layer.picks is None]
    windowed = {number for number in attending if layers[number].window is not None}
    return {*attending} - windowed, windowed


class SparseAttention:
    """`PagedAttention` of a model whose layers attend to what an index picks, or in a window.

    The attention beneath computes the tokens before position `top_k`, which attend to all. A span
    across that position is divided between the two. `windowed` computes the layers with a window.
    """

    def __init__(
        self,
        attention: PagedAttention,
        pool: torch.Tensor,
        layers: Sequence[LayerLayout],
        windowed: PagedAttention | None = None,
    ) -> None:
        self.attention = attention
        self._windowed = windowed
        self._kv = KvPool(pool, layers)
        self._top_k = next(layer.picks for layer in layers if layer.picks is not None)
        self._spans: list[tuple[Span, slice]] = []  # each with its rows
        self._sparse: list[_SparsePart] = []
        self._dense_rows: list[int] = []

    def begin(self, spans: Sequence[Span]) -> None:
        self._spans, self._sparse, self._dense_rows = [], [], []
        dense, first = [], 0
        for span in spans:
            end = first + len(span.tokens)
            border = min(end, max(first, first + self._top_k - span.start))
            if border > first:
                dense.append(replace(span, tokens=span.tokens[: border - first]))
                self._dense_rows += range(first, border)
            if border < end:
                position = span.start + border - first
                self._sparse.append(_SparsePart(span, border, end, position))
            self._spans.append((span, slice(first, end)))
            first = end
        self.attention.begin(dense)
        if self._windowed is not None:
            self._windowed.begin(spans)

    def pick(self, layer: int, rows: IndexRows) -> None:
        """See `PagedIndex`."""
        kept = self._kv.layers[layer].key[:, :, 0]  # [num_blocks, block_size, D]
        for span, own in self._spans:
            for offset, count, block, row in pieces(span, self._kv.block_size):
                if span.write_kv:
                    first = own.start + offset
                    kept[block, row : row + count] = rows.key[first : first + count]
        for part in self._sparse:
            end = part.position + part.end - part.first
            keys, _ = gather(self._kv, layer, part.span.block_table, end)
            own = slice(part.first, part.end)
            positions = picked(
                rows.query[own], rows.weights[own], keys[:, 0], part.position, self._top_k
            )
            table = torch.tensor(part.span.block_table, device=positions.device)
            part.blocks = table[positions // self._kv.block_size]
            part.rows = positions % self._kv.block_size

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if not call.options.picked:
            assert self._windowed is not None, call.layer
            return self._windowed.attend(call)
        if not self._sparse:
            return self.attention.attend(call)
        for span, own in self._spans:
            if span.write_kv:
                write_span(self._kv, span, call.of(own))
        output = call.query.new_zeros(*call.query.shape[:2], call.value.shape[2])
        if self._dense_rows:
            rows = torch.tensor(self._dense_rows, device=output.device)
            keys = call.key[rows]
            values = keys[..., : call.value.shape[2]]
            dense = call._replace(query=call.query[rows], key=keys, value=values)
            output[rows] = self.attention.attend(dense)
        for part in self._sparse:
            output[part.first : part.end] = self._attend(call, part)
        return output

    def _attend(self, call: AttentionCall, part: _SparsePart) -> torch.Tensor:
        assert part.blocks is not None and part.rows is not None, "no index picked"
        kept, query = self._kv.layers[call.layer], call.query
        count = 1 if query.device.type == "cpu" else _QUERIES
        outputs = []
        for at in range(0, part.end - part.first, count):
            keys = kept.key[part.blocks[at : at + count], part.rows[at : at + count], 0]
            asked = query[part.first + at : min(part.first + at + count, part.end)]
            outputs.append(attend_picked(asked, keys, kept.value.shape[-1], call.options))
        return torch.cat(outputs)

    def finish(self) -> None:
        self.attention.finish()
        if self._windowed is not None:
            self._windowed.finish()
        self._spans, self._sparse, self._dense_rows = [], [], []

    def forget(self, sequence_id: int) -> None:
        self.attention.forget(sequence_id)
        if self._windowed is not None:
            self._windowed.forget(sequence_id)


def picked(
    query: torch.Tensor,
    weights: torch.Tensor,
    key: torch.Tensor,
    start: int,
    top_k: int,
    *,
    rate: int = 1,
) -> torch.Tensor:
    """The positions, in ascending order, of the `top_k` keys that the index picks for each query:
    [T, top_k].

    The queries are at positions from `start` on, each of which sees more than `top_k` keys. query:
    [T, H, D]; weights: [T, H]; key: [N, D], one for each `rate` tokens, N = (start + T) // rate.
    """
    num_heads, num_keys = query.shape[1], len(key)
    keys = pad(key.float(), (0, 0, 0, padded_keys(num_keys) - num_keys))
    step = max(1, _SCORES // (num_heads * len(keys)))
    chosen = []
    for at in range(0, len(query), step):
        scores = _scores(query[at : at + step].float(), weights[at : at + step], keys)
        ends = torch.arange(start + at + 1, start + at + 1 + len(scores), device=key.device) // rate
        unseen = torch.arange(len(keys), device=key.device) >= ends[:, None]
        scores = scores.nan_to_num_(nan=-torch.inf).masked_fill_(unseen, -torch.inf)
        chosen.append(_best(scores, top_k))
    return torch.cat(chosen)


def _scores(query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """I(q, k), [T, N]. Rows and keys are padded, because a kernel's bits may depend on how many are
    left over (`engine.attention.dense`)."""
    rows, dim = padded_rows(query.flatten(0, 1)), key.shape[1]
    by_onednn = key.device.type == "cpu" and needs_onednn(dim, dim)
    products = (onednn_product if by_onednn else torch.mm)(rows, key.t())
    products = products[: query.shape[:2].numel()].relu_()
    by_head = products.view(*query.shape[:2], -1).mul_(weights[:, :, None]).unbind(1)
    scores = by_head[0].clone()
    for each in by_head[1:]:
        scores += each  # `sum` would add the last keys of a row in another order than the others
    return scores


def _best(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """The places of each row's `top_k` highest scores, of equal ones the first: [T, top_k]."""
    least = scores.topk(top_k, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > least, scores == least
    missing = top_k - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= missing))).nonzero()[:, 1].view(-1, top_k)


def attend_picked(
    query: torch.Tensor, key: torch.Tensor, value_dim: int, options: AttentionOptions
) -> torch.Tensor:
    """Attention of each query over keys of its own, whose leading part is their value.

    query: [T, H, Dk]; key: [T, K, Dk]. Returns [T, H, Dv].
    """
    keys = key.float()
    scores = torch.bmm(query.float() * options.scaling, keys.transpose(1, 2))
    sinks = None if options.sinks is None else options.sinks[:, None]
    return torch.bmm(softmax_with_sinks(scores, sinks), keys[..., :value_dim]).to(query.dtype)
