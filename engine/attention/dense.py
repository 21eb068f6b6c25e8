"""Attention on a CPU over keys and values stored by head, as pure functions of tensors.

TorchScript compiles them (`engine.torchscript`), so that a layer's attention is one call. A step of
16 sequences makes about 4,000 calls of torch here. From Python, each would release Python's lock
and wait for it again. Called uncompiled, they compute the same bits.

A token gets the same bits alone, beside others and inside a chunk of any size. One library does all
products, always in the kernel for whole groups of rows and of `_LANES` keys. It is torch's BLAS, or
oneDNN on processors for which the BLAS has no such kernel (`attention.agreement`). Sums over keys
are cut at the same positions for all. docs/exactness.md tells what breaks otherwise.
"""

from typing import NamedTuple

import torch

import engine.operators.library  # noqa: F401  defines the operators
from engine.attention.base import (
    AttentionCall,
    AttentionOptions,
    causal_mask,
    first_seen,
    softmax_with_sinks,
)

_ROWS = 4  # rows are padded to a multiple, because MKL has another kernel for those left over.
_WIDE, _WIDE_ROWS = 80, 12  # For few rows of more numbers than this it has one with AVX-512, so
_WIDEST, _WIDEST_ROWS = 256, 16  # there are at least so many.
_LANES = 16  # a softmax begins at a multiple of keys and ends at one
PIECE = 192  # values summed by one product; how MKL cuts more depends on how many there are
_MOST_SUMMED = 512  # numbers that oneDNN's products add up in one chain
TILE = 128  # query positions attended at once, so that a tile's scores stay in the cache
_TILE_ROWS = 2048  # the same, multiplied by the query heads that share a key
_SMALL = 1024  # multiplications; below 400, torch does those of a batch in a loop of its own


class StepPart(NamedTuple):
    """Rows [first, first + num_rows) of a step: one token each of as many sequences, or the
    positions from `start` on of one.

    `runs`, of one token each: each sequence's only run [parts, Hkv, capacity, D]. Its KV is written
    to the rows of `buffer` [N, D] that `rows` [num_rows * Hkv] names for each part, or not at all
    without a buffer. `runs`, of one sequence: all its runs; `write` says whether its KV is written.
    A named tuple, because TorchScript takes no dataclass.
    """

    first: int
    num_rows: int
    runs: list[torch.Tensor]
    positions: list[int]  # of one token each; otherwise empty
    buffer: torch.Tensor | None
    rows: list[torch.Tensor]
    start: int
    write: bool


class KvPlace(NamedTuple):
    """Where a layer's keys and values are: the run, and the part in it."""

    key_run: int
    key_part: int
    value_run: int
    value_part: int


class Tools(NamedTuple):
    """What attention is computed with.

    heads: sizes for which the compiled operator does it where it can. onednn: elsewhere oneDNN
    multiplies, not torch's BLAS. triangle [TILE, TILE] is -inf above its diagonal. scratch grows to
    the room that a tile's scores need.
    """

    heads: list[int]
    onednn: bool
    triangle: torch.Tensor
    scratch: torch.Tensor


def new_tools(*, onednn: bool) -> Tools:
    """Tools without the compiled operator, made by the calling thread's team."""
    triangle = torch.full((TILE, TILE), -torch.inf).triu(1)
    return Tools([], onednn, triangle, torch.empty(0, dtype=torch.float32))


def attend_part(
    call: AttentionCall, part: StepPart, place: KvPlace, tools: Tools, output: torch.Tensor
) -> torch.Tensor:
    """Attention of one part of a step in one layer, in the rows of `call`, all of whose numbers are
    float32 or as the pool rounds them. Fills and returns `output` [T, Hq, Dv]."""
    if call.key.shape[2] in tools.heads and suits_operator(call, place):
        torch.ops.cachesvc.attend_rows(
            call.query,
            call.key.float(),
            call.value.float(),
            part.first,
            1 if len(part.positions) > 0 else part.num_rows,
            part.write,
            # In another list, because torch empties the one that an operator is given.
            list(part.runs) if len(part.positions) > 0 else [part.runs[place.key_run]],
            part.positions if len(part.positions) > 0 else [part.start],
            place.key_part,
            place.value_part,
            call.options.window,
            call.options.scaling,
            output,
        )
        return output
    if len(part.positions) > 0:
        return _attend_tokens(call, part, place, tools.onednn, output)
    return _attend_span(call, part, place, tools, output)


def suits_operator(call: AttentionCall, place: KvPlace) -> bool:
    """Whether the compiled operator computes such attention, of a size of heads that it attends."""
    if call.options.softcap is not None or call.options.sinks is not None:
        return False
    return call.key.shape[2] == call.value.shape[2] and place.key_run == place.value_run


def suits_heads(dim: int) -> bool:
    """Whether the compiled operator can attend for heads of `dim`, and may have the bits."""
    return dim % _LANES == 0 and dim <= _MOST_SUMMED


def _attend_tokens(
    call: AttentionCall, part: StepPart, place: KvPlace, onednn: bool, output: torch.Tensor
) -> torch.Tensor:
    """Attention of one token each of several sequences. A sequence's keys and values are read up to
    its position. If there is a buffer, the token's own are written first."""
    first, stop = part.first, part.first + len(part.positions)
    key, value, buffer = call.key, call.value, part.buffer
    if buffer is not None:
        there = key[first:stop].reshape(-1, key.shape[2]).float()
        buffer.index_copy_(0, part.rows[place.key_part], there)
        if place.value_part != place.key_part:
            there = value[first:stop].reshape(-1, value.shape[2]).float()
            buffer.index_copy_(0, part.rows[place.value_part], there)
    num_kv_heads, groups = key.shape[1], call.query.shape[1] // key.shape[1]
    shape = [len(part.positions), num_kv_heads, groups, -1]
    scaled = padded_rows((call.query[first:stop] * call.options.scaling).view(shape))
    attended = scaled.new_empty(scaled.shape[0], scaled.shape[1], scaled.shape[2], value.shape[2])
    for number, position in enumerate(part.positions):
        keys = part.runs[number][place.key_part]
        values = part.runs[number][place.value_part, :, :, : value.shape[2]]
        _attend_one(scaled[number], keys, values, position, call.options, onednn, attended[number])
    output[first:stop].view(shape).copy_(attended[:, :, :groups])
    return output


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: int,
    options: AttentionOptions,
    onednn: bool,
    output: torch.Tensor,
) -> torch.Tensor:
    """Attention of one scaled query [Hkv, rows, Dk] at `position` over keys [Hkv, capacity, Dk] and
    values [Hkv, capacity, Dv]. The heads of a group are rows, padded. output: [Hkv, rows, Dv]."""
    softcap, sinks = options.softcap, options.sinks
    low, end = first_seen(position, options.window), position + 1
    base, top = _aligned(low, end)
    if onednn:
        scores = query.new_empty([query.shape[0], query.shape[1], top - base])
        for head in range(query.shape[0]):
            scores[head] = onednn_product(query[head], key[head, base:top].t())
    else:
        scores = torch.bmm(query, key[:, base:top].transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores.div_(softcap)).mul_(softcap)
    if low > base:
        scores[:, :, : low - base].fill_(-torch.inf)
    if top > end:
        scores[:, :, end - base :].fill_(-torch.inf)
    if sinks is None:
        weights = torch.softmax(scores, -1, out=scores)
    else:
        own = _with_rows(sinks.view(query.shape[0], -1, 1), query.shape[1])
        weights = softmax_with_sinks(scores, own)
    start = low
    while start < end:
        until = _piece_end(start, end)
        these, there = weights[:, :, start - base : until - base], value[:, start:until]
        small = until - start == 1 or _is_small(these[0].numel() * there.shape[2])
        if onednn or small:
            for head in range(query.shape[0]):
                _add_product(output[head], these[head], there[head], start == low, onednn)
        elif start == low:
            torch.bmm(these, there, out=output)
        else:
            torch.baddbmm(output, these, there, out=output)
        start = until
    return output


def _add_product(
    total: torch.Tensor, weights: torch.Tensor, values: torch.Tensor, first: bool, onednn: bool
) -> torch.Tensor:
    """Add weights [M, K] @ values [K, Dv] to `total` [M, Dv], or set it if `first`."""
    if not first and weights.shape[1] == 1:  # MKL adds some of these without rounding the product
        return total.add_(weights * values)
    if onednn:
        product = onednn_product(weights, values)
        return total.copy_(product) if first else total.add_(product)
    if first:
        return torch.mm(weights, values, out=total)
    return torch.addmm(total, weights, values, out=total)


def onednn_product(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """rows [M, K] @ columns [K, N], of two rows or more, by oneDNN. With AVX2 or AVX-512, each
    of its numbers is one chain of 512 multiply-adds or more, for any M and N. A build of torch
    without oneDNN uses its BLAS."""
    if not columns.t().is_contiguous():  # of others it is slow, and sums in another order
        columns = columns.contiguous()
    return _linear(rows, columns.t())


def _by_onednn(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    no_scalars: list[int | float | complex | None] = []  # a list of numbers to TorchScript
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        rows, weights, None, "none", no_scalars, ""
    )
    return product


def _by_blas(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.mm(rows, weights.t())


# TorchScript compiles no call of an operator that a build has not.
_linear = _by_onednn if hasattr(torch.ops.mkldnn, "_linear_pointwise") else _by_blas


def onednn_products(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The same for each head: rows [H, M, K] @ columns [H, K, N]."""
    return torch.stack([onednn_product(rows[n], columns[n]) for n in range(rows.shape[0])])


# TorchScript knows no module's constants, but arguments' defaults.


def padded_rows(rows: torch.Tensor) -> torch.Tensor:
    """[..., M, D] with rows of zeros up to as many as one kernel of the BLAS multiplies."""
    return _with_rows(rows, _num_padded(rows.shape[-2], rows.shape[-1]))


def _num_padded(
    count: int,
    dim: int,
    rows: int = _ROWS,
    wide: int = _WIDE,
    wide_rows: int = _WIDE_ROWS,
    widest: int = _WIDEST,
    widest_rows: int = _WIDEST_ROWS,
) -> int:
    """To how many rows `count` rows of `dim` numbers are padded."""
    least = widest_rows if dim > widest else wide_rows if dim > wide else rows
    return max(count + -count % rows, least)


def _with_rows(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[..., num_rows, D], the last of them zeros."""
    missing = num_rows - rows.shape[-2]
    return torch.constant_pad_nd(rows, [0, 0, 0, missing]) if missing > 0 else rows


def _aligned(low: int, end: int, lanes: int = _LANES) -> tuple[int, int]:
    """Keys [low, end) and those beside them that a softmax also takes."""
    return low - low % lanes, end + -end % lanes


def _piece_end(start: int, end: int, piece: int = PIECE) -> int:
    """The end of the piece that begins at `start`."""
    return min(start - start % piece + piece, end)


def _is_small(num_products: int, small: int = _SMALL) -> bool:
    return num_products < small


def _attend_span(
    call: AttentionCall, part: StepPart, place: KvPlace, tools: Tools, output: torch.Tensor
) -> torch.Tensor:
    """Attention of successive positions of one sequence, a tile of them at a time. Keys and values
    are read up to the last. The span's own are written first, if requested."""
    first, start, options = part.first, part.start, call.options
    stop, end = first + part.num_rows, start + part.num_rows
    keys = part.runs[place.key_run][place.key_part]
    values = part.runs[place.value_run][place.value_part, :, :, : call.value.shape[2]]
    if part.write:
        keys[:, start:end].copy_(call.key[first:stop].transpose(0, 1))
        values[:, start:end].copy_(call.value[first:stop].transpose(0, 1))
    scaled = call.query[first:stop] * options.scaling
    groups = scaled.shape[1] // keys.shape[0]
    if part.num_rows == 1:
        one = padded_rows(scaled[0].view(keys.shape[0], groups, -1))
        attended = one.new_empty(one.shape[0], one.shape[1], values.shape[2])
        _attend_one(one, keys, values, start, options, tools.onednn, attended)
        output[first].view(keys.shape[0], groups, -1).copy_(attended[:, :groups])
        return output
    tile = _tile_rows(groups)
    size = _scratch_size(groups * min(tile, part.num_rows), end)
    if tools.scratch.numel() < size:
        tools.scratch.resize_(size)
    for low in range(start - start % tile, end, tile):
        begin, until = max(low, start), min(low + tile, end)
        filled = output[first + begin - start : first + until - start]
        query = scaled[begin - start : until - start]
        _attend_tile(query, keys, values, begin, options, tools, filled)
    return output


def _attend_tile(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    options: AttentionOptions,
    tools: Tools,
    output: torch.Tensor,
) -> torch.Tensor:
    """Attention of scaled queries [T, Hq, Dk] at positions from `start` over keys [Hkv, capacity,
    Dk]. The triangle keeps each query from later keys."""
    onednn, triangle = tools.onednn, tools.triangle
    num_queries, dim = query.shape[0], query.shape[2]
    num_kv_heads, value_dim = key.shape[0], value.shape[2]
    groups = query.shape[1] // num_kv_heads
    window, softcap, sinks = options.window, options.softcap, options.sinks
    low, end = first_seen(start, window), start + num_queries
    base, top = _aligned(low, end)
    folded = query.view(num_queries, num_kv_heads, groups, dim)
    folded = padded_rows(
        folded.permute(1, 2, 0, 3).reshape(num_kv_heads, groups * num_queries, dim)
    )
    num_rows = folded.shape[1]
    # Into memory that the next call reuses, because fresh pages would cost twice as much.
    scores = tools.scratch[: num_rows * (top - base)].view(num_rows, top - base)
    real = scores[: groups * num_queries].view(groups, num_queries, top - base)
    attended = query.new_empty(num_rows, value_dim)
    to = output.view(num_queries, num_kv_heads, groups, value_dim)
    for head in range(num_kv_heads):
        if onednn:
            scores.copy_(onednn_product(folded[head], key[head, base:top].t()))
        else:
            torch.mm(folded[head], key[head, base:top].t(), out=scores)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if window is None:
            real[:, :, start:end] += triangle[:num_queries, :num_queries]
        else:
            mask = causal_mask(num_queries, start - base, window, scores.device)
            real[:, :, : end - base].masked_fill_(~mask, -torch.inf)
        if top > end:
            scores[:, end - base :].fill_(-torch.inf)
        if sinks is None:
            weights = torch.softmax(scores, -1, out=scores)
        else:
            own = sinks.view(num_kv_heads, groups, 1)[head].expand(groups, num_queries)
            weights = softmax_with_sinks(scores, _with_rows(own.reshape(-1, 1), num_rows))
        first = low
        while first < end:
            until = _piece_end(first, end)
            these = weights[:, first - base : until - base]
            _add_product(attended, these, value[head, first:until], first == low, onednn)
            first = until
        sums = attended[: groups * num_queries].view(groups, num_queries, value_dim)
        to[:, head] = sums.transpose(0, 1)
    return output


def _scratch_size(
    num_rows: int, num_keys: int, rows: int = _WIDEST_ROWS, lanes: int = _LANES
) -> int:
    """How many numbers a tile's scores take."""
    return (num_rows + rows) * (num_keys + 2 * lanes)


def _tile_rows(groups: int, tile: int = TILE, rows: int = _TILE_ROWS) -> int:
    """How many query positions are attended at once. `groups` query heads share a key."""
    return max(1, min(tile, rows // groups))


def padded_keys(num_keys: int) -> int:
    """How many rows of keys are read for the first `num_keys`. The rest need not hold anything."""
    return num_keys + -num_keys % _LANES
