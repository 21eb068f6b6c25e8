"""Whether the compiled attention gives the bits of `attention.dense` on this machine.

Both add up in the order of MKL's matrix products and torch's softmax, as measured. Another build of
either could have another order, so a start compares them before it uses the operator.
"""

import torch

from engine.attention.base import AttentionCall, AttentionOptions
from engine.attention.dense import PIECE, attend_tokens

_POSITIONS = (0, 5, 16, 63, PIECE - 1, PIECE, 2 * PIECE + 5, 777)
_GROUPS = (1, 3, 4, 8)  # query heads that share a key: fewer rows than a kernel's four, and more
_WINDOWS = (None, 100)
_HEADS = 2


@torch.inference_mode()
def operator_agrees(dim: int) -> bool:
    """For heads of `dim`, over numbers and positions that reach all its branches."""
    random = torch.Generator().manual_seed(dim)
    capacity, count = max(_POSITIONS) + 1 + -(max(_POSITIONS) + 1) % 16, len(_POSITIONS)
    shape = (count, 2, _HEADS, capacity, dim)
    for groups in _GROUPS:
        query = torch.randn(count, groups * _HEADS, dim, generator=random)
        key, value = (torch.randn(count, _HEADS, dim, generator=random) for _ in range(2))
        for window in _WINDOWS:
            call = AttentionCall(0, query, key, value, AttentionOptions(dim**-0.5, window))
            copies = torch.randn(shape, generator=random)
            expected, actual = _attended(call, copies), torch.empty_like(query)
            written = copies.clone()
            torch.ops.cachesvc.attend_tokens(
                *(query, key, value, 0, True, list(written), list(_POSITIONS)),
                *(0, 1, window, call.options.scaling, actual),
            )
            for number, position in enumerate(_POSITIONS):
                copies[number, 0, :, position] = key[number]
                copies[number, 1, :, position] = value[number]
            if not torch.equal(expected, actual) or not torch.equal(copies, written):
                return False
    return True


def _attended(call: AttentionCall, copies: torch.Tensor) -> torch.Tensor:
    """Rows of `call`, one of each copy, as torch's own calls attend them."""
    count, parts, heads, capacity, dim = copies.shape
    mine = copies.clone()
    head = torch.arange(count)[:, None] * parts * heads + torch.arange(heads)
    rows = [
        ((head + part * heads) * capacity + torch.tensor(_POSITIONS)[:, None]).flatten()
        for part in range(parts)
    ]
    output = torch.empty_like(call.query)
    return attend_tokens(
        call, 0, mine.view(-1, dim), rows, list(mine), 0, 1, list(_POSITIONS), output
    )
