"""What `attention.dense` may use on this machine: which library's products, and whether the
compiled attention in its place gives its bits.

Both add up in the order of matrix products and torch's softmax, as measured. Another build of
either, or another processor, could have another order, so a start compares before it chooses.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch

from engine.attention.base import AttentionCall, AttentionOptions
from engine.attention.dense import (
    PIECE,
    KvPlace,
    StepPart,
    attend_part,
    new_tools,
    onednn_product,
    onednn_products,
    padded_keys,
    padded_rows,
)

_POSITIONS = (0, 5, 16, 63, PIECE - 1, PIECE, 2 * PIECE + 5, 777)
_SPANS = ((0, 7), (61, 2), (PIECE - 3, 5), (500, 20))  # first position, tokens
_SHARED = (770, 2)  # of one head, whose keys threads share
_GROUPS = (1, 3, 4, 8)  # query heads that share a key: fewer rows than a vector's, and more
_WINDOWS = (None, 100)
_HEADS = 2

_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Factors = Sequence[tuple[torch.Tensor, torch.Tensor]]
_NUM_ROWS = (1, 5, 9, 13, 17, 21, 33, 60, 61, 125, 384)  # before they are padded
_NUM_KEYS = (16, 48, 80, 192, 784)
_PIECES = (2, 5, 16, 33, 128, PIECE - 1, PIECE)


@cache
def needs_onednn(key_dim: int, value_dim: int) -> bool:
    """Whether oneDNN must multiply for heads of such keys and values, because a row of torch's BLAS
    depends on how many there are. So it does on Intel processors without AVX-512: MKL has several
    kernels there."""
    random = torch.Generator().manual_seed(key_dim)
    rows = torch.randn(_NUM_ROWS[-1], max(key_dim, PIECE), generator=random)
    keys = torch.randn(_NUM_KEYS[-1], key_dim, generator=random)
    values = torch.randn(PIECE, value_dim, generator=random)
    factors = [(rows[:, :key_dim], keys[:count].t()) for count in _NUM_KEYS]
    factors += [(rows[:, :count], values[:count]) for count in _PIECES]
    is_steady = _is_steady(torch.mm, factors, key_dim)
    return not is_steady and _is_steady(onednn_product, factors, key_dim)


@cache
def heads_need_onednn(inputs: int, outputs: int, dtype: torch.dtype) -> bool:
    """The same for rows of each head times its matrix [inputs, outputs] (`attention.latent`)."""
    random = torch.Generator().manual_seed(inputs)
    rows = torch.randn(_HEADS, _NUM_ROWS[-1], inputs, generator=random).to(dtype)
    matrices = torch.randn(_HEADS, inputs, outputs, generator=random).to(dtype)
    factors = [(rows, matrices)]
    is_steady = _is_steady(torch.bmm, factors, inputs)
    return not is_steady and _is_steady(onednn_products, factors, inputs)


@torch.inference_mode()
def _is_steady(product: _Product, factors: _Factors, dim: int) -> bool:
    """Whether a row's products have the same bits among any number of rows, padded as rows of `dim`
    numbers are."""
    counts = {padded_rows(torch.empty(count, dim)).shape[0] for count in _NUM_ROWS}
    try:
        for rows, columns in factors:
            together = product(rows, columns)
            for count in counts:
                few = product(rows[..., :count, :], columns)
                if not torch.equal(few, together[..., :count, :]):
                    return False
    except RuntimeError:  # a dtype that the library does not multiply here
        return False
    return True


@torch.inference_mode()
def operator_agrees(dim: int) -> bool:
    """For heads of `dim`, over numbers and positions that reach all its branches."""
    random = torch.Generator().manual_seed(dim)
    copies = torch.randn(
        len(_POSITIONS), 2, _HEADS, padded_keys(max(_POSITIONS) + 1), dim, generator=random
    )
    written = copies.clone()  # by the operator; both stay equal while it agrees
    one = copies[0, :, :1].contiguous()
    return all(
        _tokens_agree(copies, written, groups, window, random)
        and all(
            _span_agrees(copies[0], written[0], groups, window, *span, random) for span in _SPANS
        )
        and _span_agrees(one, one.clone(), groups, window, *_SHARED, random)
        for groups in _GROUPS
        for window in _WINDOWS
    )


def _tokens_agree(
    copies: torch.Tensor,
    written: torch.Tensor,
    groups: int,
    window: int | None,
    random: torch.Generator,
) -> bool:
    """Of one token each of several sequences, whose equal copies [S, 2, Hkv, capacity, D] are
    written."""
    count, _, _, capacity, dim = copies.shape
    head = torch.arange(count)[:, None] * 2 * _HEADS + torch.arange(_HEADS)
    rows = [
        ((head + part * _HEADS) * capacity + torch.tensor(_POSITIONS)[:, None]).flatten()
        for part in range(2)
    ]
    buffer, positions = copies.view(-1, dim), list(_POSITIONS)
    part = StepPart(0, count, list(copies), positions, buffer, rows, 0, True)
    call = _call(count, _HEADS, groups, dim, window, random)
    return _attend_alike(call, part, list(written)) and torch.equal(copies, written)


def _span_agrees(
    copy: torch.Tensor,
    written: torch.Tensor,
    groups: int,
    window: int | None,
    start: int,
    count: int,
    random: torch.Generator,
) -> bool:
    """Of several tokens of one sequence, over two equal copies [2, Hkv, capacity, D]."""
    part = StepPart(0, count, [copy], [], None, [], start, True)
    call = _call(count, copy.shape[1], groups, copy.shape[-1], window, random)
    return _attend_alike(call, part, [written]) and torch.equal(copy, written)


def _call(
    count: int, heads: int, groups: int, dim: int, window: int | None, random: torch.Generator
) -> AttentionCall:
    query = torch.randn(count, groups * heads, dim, generator=random)
    key, value = (torch.randn(count, heads, dim, generator=random) for _ in range(2))
    return AttentionCall(0, query, key, value, AttentionOptions(dim**-0.5, window))


def _attend_alike(call: AttentionCall, part: StepPart, written: list[torch.Tensor]) -> bool:
    """Whether the operator, over `written`, gives what `dense` does over the part's runs."""
    dim, place = call.query.shape[2], KvPlace(0, 0, 0, 1)
    tools = new_tools(onednn=needs_onednn(dim, dim))
    expected, actual = torch.empty_like(call.query), torch.empty_like(call.query)
    attend_part(call, part._replace(runs=written), place, tools._replace(heads=[dim]), actual)
    attend_part(call, part, place, tools, expected)
    return torch.equal(expected, actual)
