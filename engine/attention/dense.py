"""Attention on a CPU over keys and values stored by head, as pure functions of tensors.

TorchScript compiles them (`engine.torchscript`), so that a layer's attention is one call. A step of
16 sequences makes about 4,000 calls of torch here. From Python, each would release Python's lock
and wait for it again. Called uncompiled, they compute the same bits.
"""

import torch

from engine.attention.base import causal_mask, first_seen, softmax_with_sinks


def attend_tokens(
    first: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    buffer: torch.Tensor | None,
    rows: list[torch.Tensor],
    runs: list[torch.Tensor],
    key_part: int,
    value_part: int,
    positions: list[int],
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
) -> torch.Tensor:
    """Attention of one token of each of S sequences. They are rows [first, first + S) of a step's
    query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv] and output [T, Hq, Dv].

    A sequence's keys and values are two parts, or one, of its run [parts, Hkv, capacity, D], and
    are read up to its position. If there is a buffer [N, D], the token's own are written first, to
    its rows that `rows` [S * Hkv] names for each part. Fills and returns `output`.
    """
    stop = first + len(positions)
    if buffer is not None:
        there = key[first:stop].reshape(-1, key.shape[2]).float()
        buffer.index_copy_(0, rows[key_part], there)
        if value_part != key_part:
            there = value[first:stop].reshape(-1, value.shape[2]).float()
            buffer.index_copy_(0, rows[value_part], there)
    scaled = query[first:stop] * scaling
    shape = [key.shape[1], query.shape[1] // key.shape[1], -1]
    for number, position in enumerate(positions):
        keys = runs[number][key_part, :, : position + 1].transpose(1, 2)
        values = runs[number][value_part, :, : position + 1, : value.shape[2]]
        one, to = scaled[number].view(shape), output[first + number].view(shape)
        attend_one(one, keys, values, position, window, softcap, sinks, to)
    return output


def attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: int,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
) -> torch.Tensor:
    """Attention of one scaled query [Hkv, groups, Dk] at `position` over keys [Hkv, Dk, position +
    1] and values [Hkv, position + 1, Dv]. The heads of a group share a GEMM. output: [Hkv, groups,
    Dv]."""
    low = first_seen(position, window)
    if low > 0:
        key, value = key[:, :, low:], value[:, low:]
    scores = torch.bmm(query, key)
    if softcap is not None:
        scores = torch.tanh(scores.div_(softcap)).mul_(softcap)
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        weights = softmax_with_sinks(scores, sinks.view(scores.shape[0], scores.shape[1], 1))
    return torch.bmm(weights, value, out=output)


def attend_span(
    first: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    write: bool,
    key_run: torch.Tensor,
    key_part: int,
    value_run: torch.Tensor,
    value_part: int,
    start: int,
    end: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    tile: int,
    triangle: torch.Tensor,
    scratch: torch.Tensor,
    output: torch.Tensor,
) -> torch.Tensor:
    """Attention of positions [start, end) of one sequence, `tile` of them at a time. They are the
    rows from `first` on of a step's query, key, value and output, as in `attend_tokens`.

    Keys and values are one part each of runs [parts, Hkv, capacity, D], and are read up to `end`.
    The span's own are written first, if requested. `triangle` [tile, tile] is -inf above its
    diagonal. `scratch` has room for a tile's scores. Fills and returns `output`.
    """
    stop = first + end - start
    keys, values = key_run[key_part], value_run[value_part, :, :, : value.shape[2]]
    if write:
        keys[:, start:end].copy_(key[first:stop].transpose(0, 1))
        values[:, start:end].copy_(value[first:stop].transpose(0, 1))
    keys, values = keys[:, :end], values[:, :end]
    scaled = query[first:stop] * scaling
    if end - start == 1:
        shape = [keys.shape[0], query.shape[1] // keys.shape[0], -1]
        one, to = scaled[0].view(shape), output[first].view(shape)
        attend_one(one, keys.transpose(1, 2), values, start, window, softcap, sinks, to)
        return output
    if values.stride(1) != values.shape[2]:
        # A leading part of keys (latents). With gaps between rows, oneDNN multiplies a thousand
        # times more slowly (2,048 x 256 by 512: 6.3 s instead of 4.7 ms on an AMD EPYC).
        values = values.contiguous()
    for low in range(start - start % tile, end, tile):
        begin, until = max(low, start), min(low + tile, end)
        seen = first_seen(begin, window)
        _attend_tile(
            scaled[begin - start : until - start],
            keys[:, seen:until],
            values[:, seen:until],
            begin - seen,
            window,
            softcap,
            sinks,
            triangle,
            scratch,
            output[first + begin - start : first + until - start],
        )
    return output


def _attend_tile(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    triangle: torch.Tensor,
    scratch: torch.Tensor,
    output: torch.Tensor,
) -> torch.Tensor:
    """Attention of scaled queries [T, Hq, Dk] at positions from `start` over keys [Hkv, start + T,
    Dk]."""
    num_queries, dim = query.shape[0], query.shape[2]
    num_kv_heads, num_keys = key.shape[0], key.shape[1]
    groups, value_dim = query.shape[1] // num_kv_heads, value.shape[2]
    folded = query.view(num_queries, num_kv_heads, groups, dim)
    folded = folded.permute(1, 2, 0, 3).reshape(num_kv_heads, groups * num_queries, dim)
    to = output.view(num_queries, num_kv_heads, groups, value_dim)
    for head in range(num_kv_heads):
        scores = _matmul(folded[head], key[head]).view(groups, num_queries, num_keys)
        if softcap is not None:
            scores = torch.tanh(scores.div_(softcap)).mul_(softcap)
        if window is None:
            scores[:, :, start:] += triangle[:num_queries, :num_queries]
        else:
            mask = causal_mask(num_queries, start, window, scores.device)
            scores.masked_fill_(~mask, float("-inf"))
        if sinks is None:
            # Into memory that the next call reuses, because fresh pages would cost twice as much.
            weights = scratch[: scores.numel()].view(groups * num_queries, num_keys)
            torch.softmax(scores.view(-1, num_keys), -1, out=weights)
        else:
            own = sinks.view(num_kv_heads, groups, 1, 1)[head]
            weights = softmax_with_sinks(scores, own).view(-1, num_keys)
        attended = _matmul(weights, value[head].t()).view(groups, num_queries, value_dim)
        to[:, head] = attended.transpose(0, 1)
    return output


if torch.backends.mkldnn.is_available():

    def _matmul(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """rows [M, K] @ weight.T, weight [N, K], by oneDNN, which torch itself would not use
        here."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, weight, None, "none", [], ""
        )
        return product

else:

    def _matmul(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, weight)
