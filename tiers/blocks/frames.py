"""Host frames: the memory in which every copy between tiers meets.

A `FrameArena` is one allocation of whole-block frames, pinned where there is a CUDA device. The
engine thread takes and gives frames back; reader and writer threads only fill or read the frames
they were handed.
"""

import logging

import numpy as np
import torch

from tiers.blocks.layout import BlockLayout
from tiers.errors import ConfigurationError

logger = logging.getLogger(__name__)


class Frame:
    """One block's worth of host memory. Whoever holds the frame owns its bytes.

    `tensor` has the layout's shape and dtype; `buffer` is the same memory as writable bytes, for
    code that knows no torch.
    """

    __slots__ = ("buffer", "number", "tensor")

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number = number
        self.tensor = tensor
        flat = tensor.reshape(-1).view(torch.uint8)
        self.buffer = flat.numpy().data.cast("B")


class FrameArena:
    """`num_frames` frames in one allocation. Invariant: free + taken == num_frames."""

    def __init__(self, layout: BlockLayout, num_frames: int) -> None:
        if num_frames < 1:
            raise ConfigurationError(
                f"the host cache must hold at least one block of {layout.nbytes} bytes; "
                f"raise --host-cache"
            )
        self.layout = layout
        self.num_frames = num_frames
        self.pinned = torch.cuda.is_available()
        pool = _pinned(layout, num_frames) if self.pinned else _pageable(layout, num_frames)
        self._memory = pool
        self._frames = [Frame(number, pool[number]) for number in range(num_frames)]
        self._free = list(reversed(self._frames))

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
        return self._free.pop() if self._free else None

    def give(self, frame: Frame) -> None:
        """Give a frame back; the caller must not touch it again."""
        assert len(self._free) < self.num_frames, "a frame was given back twice"
        self._free.append(frame)


def _pinned(layout: BlockLayout, num_frames: int) -> torch.Tensor:
    return torch.empty((num_frames, *layout.shape), dtype=layout.torch_dtype, pin_memory=True)


def _pageable(layout: BlockLayout, num_frames: int) -> torch.Tensor:
    """Memory of huge pages where the system gives them, as numpy asks and torch does not.

    The first touch of 190 MiB took 0.30 s in pages of 4 KiB and 0.02 s in huge ones (two cores of a
    virtual machine), which the first hits after a start would wait for.
    """
    memory = np.zeros(num_frames * layout.nbytes, np.uint8)
    return torch.from_numpy(memory).view(layout.torch_dtype).view(num_frames, *layout.shape)
