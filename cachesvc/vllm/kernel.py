"""One kernel that moves staged blocks between rows of bytes and the slabs of all layers.

Imported only with a GPU, or under Triton's interpreter in tests.
"""
# ruff: noqa: N803  compile-time arguments are written as constants, as in Triton's own kernels

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_TILE = 1024  # words that a program moves at once


@triton.jit(do_not_specialize=("stride",))  # type: ignore[untyped-decorator]
def move_slabs(  # type: ignore[no-untyped-def]
    stage, slabs, starts, strides, blocks, stride, GATHER: tl.constexpr, TILE: tl.constexpr
):
    """A program moves one slab's part of one row, in words of `stage`'s type.

    stage: [rows, stride]; slabs: [num_slabs] addresses; starts: [num_slabs + 1] where each slab's
    part of a row begins; strides: [num_slabs] words from a slab's block to its next; blocks: [rows]
    numbers of blocks in the slabs.
    """
    row, slab = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + slab)
    size = tl.load(starts + slab + 1) - start
    kept = tl.load(slabs + slab).to(stage.dtype) + tl.load(blocks + row) * tl.load(strides + slab)
    staged = stage + row.to(tl.int64) * stride + start
    for at in range(0, size, TILE):
        words = at + tl.arange(0, TILE)
        there = words < size
        if GATHER:
            tl.store(staged + words, tl.load(kept + words, mask=there), mask=there)
        else:
            tl.store(kept + words, tl.load(staged + words, mask=there), mask=there)


class SlabTable:
    """The addresses of slabs on a device, which must outlive it."""

    def __init__(self, slabs: Sequence[torch.Tensor]) -> None:
        sizes = [slab.shape[1] for slab in slabs]
        strides = [slab.stride(0) for slab in slabs]
        width = next(
            each
            for each in _WORDS
            if all(n % each == 0 for n in (*sizes, *strides, *(s.data_ptr() for s in slabs)))
        )
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size // width)
        device = slabs[0].device
        self._word = _WORDS[width]
        self._starts = torch.tensor(starts, dtype=torch.int64, device=device)
        in_words = [stride // width for stride in strides]
        self._strides = torch.tensor(in_words, dtype=torch.int64, device=device)
        self._slabs = torch.tensor([slab.data_ptr() for slab in slabs], device=device)

    def move(self, stage: torch.Tensor, blocks: torch.Tensor, *, gather: bool) -> None:
        """Copy blocks into the stage's leading rows, or those rows into the blocks.

        stage: [rows, stride] bytes; blocks: [N].
        """
        assert len(blocks) <= len(stage), (len(blocks), len(stage))
        words = stage.view(self._word)
        move_slabs[len(blocks), len(self._slabs)](
            *(words, self._slabs, self._starts, self._strides, blocks, words.stride(0)),
            GATHER=gather,
            TILE=_TILE,
        )
