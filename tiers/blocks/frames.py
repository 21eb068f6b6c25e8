"""Host frames: the memory in which every copy between tiers meets.

A `FrameArena` is one allocation of whole-block frames, pinned where blocks go to a GPU. The engine
thread takes and gives frames back; reader and writer threads only fill or read the frames
they were handed.
"""

import logging
import weakref
from array import array
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tiers.blocks.layout import BlockLayout
from tiers.blocks.part import Part
from tiers.errors import ConfigurationError

logger = logging.getLogger(__name__)

PIN_BYTES = 1 << 30  # registered at once
PAGE_BYTES = 4096


class FrameMemory(Protocol):
    """Memory cut into frames."""

    def tensor(self, number: int) -> torch.Tensor: ...

    def buffer(self, number: int) -> memoryview: ...


class Frame:
    """One block's worth of host memory. The holder of the frame owns its bytes.

    A number and where it counts: a view takes 700 bytes and a microsecond, and there are millions
    of frames, of which a few at a time are looked into. `part` is what it has of its block, and
    while that is loaded, is to get.
    """

    __slots__ = ("_memory", "number", "part")

    def __init__(self, memory: FrameMemory, number: int) -> None:
        self._memory = memory
        self.number = number
        self.part = Part.WHOLE

    @property
    def tensor(self) -> torch.Tensor:
        """The frame with the layout's shape and dtype; a new view each time."""
        return self._memory.tensor(self.number)

    @property
    def buffer(self) -> memoryview:
        """The same memory as writable bytes, for code that knows no torch."""
        return self._memory.buffer(self.number)


class FrameArena:
    """`num_frames` frames in one allocation. Invariant: free + taken == num_frames."""

    def __init__(self, layout: BlockLayout, num_frames: int, device: str = "cpu") -> None:
        if num_frames < 1:
            raise ConfigurationError(
                f"the host cache must hold at least one block of {layout.nbytes} bytes; "
                f"raise --host-cache"
            )
        self.layout = layout
        self.num_frames = num_frames
        memory = _huge_pages(num_frames * layout.nbytes)
        self.num_pinned_bytes = 0
        if torch.device(device).type == "cuda":
            cudart: Any = torch.cuda.cudart()
            self.num_pinned_bytes = pin(memory, cudart)
            release = weakref.finalize(self, _unpin, memory, self.num_pinned_bytes, cudart)
            release.atexit = False  # the driver lets go of a process's memory by itself
        pool = torch.from_numpy(memory).view(layout.torch_dtype).view(num_frames, *layout.shape)
        self._memory = pool
        self._bytes: memoryview = memory.data
        self._free = array("i", range(num_frames - 1, -1, -1))

    def touch(self, max_bytes: int) -> None:
        """Let the system hand over the memory of the frames that are taken first.

        Before any frame is taken. See `TieredCache.warm_up`.
        """
        assert self.num_free == self.num_frames
        self._memory[: max_bytes // self.layout.nbytes].zero_()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> Frame | None:
        """A free frame, or None; its bytes are whatever its last holder left."""
        return Frame(self, self._free.pop()) if self._free else None

    def give(self, frame: Frame) -> None:
        """Give a frame back; the caller must not touch it again."""
        assert len(self._free) < self.num_frames, "a frame was given back twice"
        self._free.append(frame.number)

    def tensor(self, number: int) -> torch.Tensor:
        """The memory of a frame."""
        return self._memory[number]

    def buffer(self, number: int) -> memoryview:
        """The same as bytes."""
        size = self.layout.nbytes
        return self._bytes[number * size : (number + 1) * size]


def pin(memory: NDArray[np.uint8], cudart: Any) -> int:
    """Lock memory for the GPU's copies, piece by piece; how many bytes were, from the first on.

    torch's own pinned memory is rounded up to a power of two: an arena of 80 GiB would lock 128.
    What the system does not let be locked (`ulimit -l`, a container's limit) is copied more slowly.
    """
    pinned = 0
    for address, num_bytes in _pieces(memory):
        error = cudart.cudaHostRegister(address, num_bytes, 0)
        if int(error) != 0:
            logger.warning(
                f"{pinned >> 20} of {memory.nbytes >> 20} MiB of host cache are locked for the "
                f"GPU, then CUDA said {error}; copies of the rest are slow: raise the limit on "
                f"locked memory or lower --host-cache"
            )
            break
        pinned += num_bytes
    return pinned


def _unpin(memory: NDArray[np.uint8], num_bytes: int, cudart: Any) -> None:
    for address, _ in _pieces(memory[:num_bytes]):
        cudart.cudaHostUnregister(address)


def _pieces(memory: NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """Address and length of pieces that share no page: a page is registered once."""
    begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    while begin < end:
        border = min(end, (begin + PIN_BYTES) // PAGE_BYTES * PAGE_BYTES)
        yield begin, border - begin
        begin = border


def _huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Memory of huge pages where the system gives them, as numpy asks and torch does not.

    The first touch of 190 MiB took 0.30 s in pages of 4 KiB and 0.02 s in huge ones (two cores of a
    virtual machine), which the first hits after a start would wait for.
    """
    return np.zeros(num_bytes, np.uint8)
