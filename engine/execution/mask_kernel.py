"""The kernel that applies packed masks. Imported only with a GPU, or under Triton's interpreter."""
# ruff: noqa: N803  compile-time arguments are written as constants, as in Triton's own kernels

import torch
import triton
import triton.language as tl

_TILE = 4096


@triton.jit(do_not_specialize=("num_words",))  # type: ignore[untyped-decorator]
def forbid_kernel(  # type: ignore[no-untyped-def]
    logits, rows, words, row_stride, num_words, vocabulary, TILE: tl.constexpr
):
    """A program masks one tile of one row. logits: [R, vocabulary]; rows: [N]; words: [N, W]."""
    number = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = token < vocabulary
    word = tl.load(words + number * num_words + token // 32, mask=there, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    row = tl.load(rows + number)
    tl.store(logits + row * row_stride + token, float("-inf"), mask=there & forbidden)


def forbid_packed(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """See `masking.forbid`. rows: [N] int64; words: [N, W] int32; all on the device."""
    vocabulary = logits.shape[1]
    assert logits.stride(1) == 1 and 32 * words.shape[1] >= vocabulary, (logits.shape, words.shape)
    forbid_kernel[len(rows), triton.cdiv(vocabulary, _TILE)](
        logits, rows, words, logits.stride(0), words.shape[1], vocabulary, TILE=_TILE
    )
