"""A worker's KV as slabs, and the copies of whole blocks between them and rows of host memory.

A slab is one layer's KV, or its K or its V, or its state, as `[num_blocks, bytes]`. Its stride is
larger than a block where vLLM pads pages. A row is a block: a run of bytes from each slab, in
order. On a CPU every piece is one `memcpy`. On a GPU rows that follow one another are one copy, to
or from a stage on the device, and one kernel moves them between the stage and all slabs. Each
thread that copies has its own object.
"""

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from cachesvc.model_files import UnsupportedKv

STAGE_BYTES = 32 << 20  # on the device: at 50 GB/s the kernel's launch hides behind 0.6 ms of copy

_memcpy = ctypes.CDLL(None).memcpy  # a call by ctypes, unlike torch's, wakes no other thread
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


def slabs_of(tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """A layer's KV as views `[num_blocks, bytes]`, in memory order.

    Accepts any order of dimensions in which the block is first or second and its numbers are dense.
    There is one view if blocks come first, and two if K and V do. Raises UnsupportedKv.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    ordered = tensor.permute(order)
    parts = [ordered] if ordered.shape[0] == num_blocks else list(ordered.unbind(0))
    if any(part.shape[0] != num_blocks or not part[0].is_contiguous() for part in parts):
        raise UnsupportedKv(f"KV of shape {list(tensor.shape)} and strides {list(tensor.stride())}")
    return [part.flatten(1).view(torch.uint8) for part in parts]


def copier_of(slabs: Sequence[torch.Tensor], stride: int) -> "BlockCopier":
    """A copier for slabs on one device. `stride`: bytes of a row."""
    return DeviceCopier(slabs, stride) if slabs[0].is_cuda else HostCopier(slabs)


class HostCopier:
    """Slabs in ordinary memory."""

    def __init__(self, slabs: Sequence[torch.Tensor]) -> None:
        self._slabs = slabs
        self._sizes = [slab.shape[1] for slab in slabs]
        self._strides = [slab.stride(0) for slab in slabs]

    def load(
        self, rows: torch.Tensor, frames: Sequence[int], blocks: Sequence[int], piece: int
    ) -> None:
        for row, slab, size in self._pieces(rows, frames, blocks):
            _memcpy(slab, row, size)

    def save(
        self, rows: torch.Tensor, frames: Sequence[int], blocks: Sequence[int], piece: int
    ) -> None:
        for row, slab, size in self._pieces(rows, frames, blocks):
            _memcpy(row, slab, size)

    def _pieces(
        self, rows: torch.Tensor, frames: Sequence[int], blocks: Sequence[int]
    ) -> Iterator[tuple[int, int, int]]:
        """The addresses of each piece in its row and its slab, and its bytes; row after row."""
        _check(frames, len(rows))
        _check(blocks, len(self._slabs[0]))
        sizes = np.array(self._sizes)
        starts = np.cumsum(sizes) - sizes
        in_rows = rows.data_ptr() + np.outer(frames, [rows.stride(0)]) + starts
        bases = np.array([slab.data_ptr() for slab in self._slabs])
        in_slabs = bases + np.outer(blocks, self._strides)
        yield from zip(
            in_rows.ravel().tolist(), in_slabs.ravel().tolist(), self._sizes * len(frames),
            strict=True,
        )  # fmt: skip


class DeviceCopier:
    """Slabs on a GPU. Works on the caller's current stream."""

    def __init__(self, slabs: Sequence[torch.Tensor], stride: int) -> None:
        from cachesvc.vllm.kernel import SlabTable

        num_rows = max(1, STAGE_BYTES // stride)
        self._slabs = slabs  # whose addresses the table has
        self._device = slabs[0].device
        self._stage = torch.empty(num_rows, stride, dtype=torch.uint8, device=self._device)
        self._table = SlabTable(slabs)

    def load(
        self, rows: torch.Tensor, frames: Sequence[int], blocks: Sequence[int], piece: int
    ) -> None:
        numbers = self._upload(blocks, frames, rows)
        try:
            for begin, end in self._batches(len(frames)):
                for row, staged in self._runs(rows, frames[begin:end], piece):
                    staged.copy_(row, non_blocking=True)
                self._table.move(self._stage, numbers[begin:end], gather=False)
        finally:
            self._wait()

    def save(
        self, rows: torch.Tensor, frames: Sequence[int], blocks: Sequence[int], piece: int
    ) -> None:
        numbers = self._upload(blocks, frames, rows)
        try:
            for begin, end in self._batches(len(frames)):
                self._table.move(self._stage, numbers[begin:end], gather=True)
                for row, staged in self._runs(rows, frames[begin:end], piece):
                    row.copy_(staged, non_blocking=True)
        finally:
            self._wait()

    def _batches(self, count: int) -> Iterator[tuple[int, int]]:
        """What fits the stage at once."""
        for begin in range(0, count, len(self._stage)):
            yield begin, min(begin + len(self._stage), count)

    def _runs(
        self, rows: torch.Tensor, frames: Sequence[int], piece: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows that follow one another, and their place in the stage."""
        for begin, end in runs_of(frames, piece):
            first = frames[begin]
            yield rows[first : first + end - begin], self._stage[begin:end]

    def _upload(
        self, blocks: Sequence[int], frames: Sequence[int], rows: torch.Tensor
    ) -> torch.Tensor:
        _check(frames, len(rows))
        _check(blocks, len(self._slabs[0]))
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


# Copies blocks between `rows[frames[i]]` and block `blocks[i]` of all slabs.
#
# `rows`: [num_frames, stride] bytes of host memory. No copy crosses a multiple of `piece` frames:
# there another registration of pinned memory begins. When a call returns, the bytes are there.
# When it raises, nothing is under way: frames and blocks get other owners.
BlockCopier = HostCopier | DeviceCopier


def runs_of(frames: Sequence[int], piece: int) -> Iterator[tuple[int, int]]:
    """Bounds of the runs of successive frames, of which none crosses a multiple of `piece`."""
    numbers: NDArray[np.int64] = np.asarray(frames, np.int64)
    breaks = (np.diff(numbers) != 1) | (numbers[1:] % piece == 0)
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(frames)]
    yield from pairwise(bounds) if frames else ()


def _check(numbers: Sequence[int], count: int) -> None:
    """Nothing outside a tensor is ever copied, whatever a node says."""
    if numbers and not 0 <= min(numbers) <= max(numbers) < count:
        raise IndexError(f"a block or frame of {count} was {min(numbers)} to {max(numbers)}")
