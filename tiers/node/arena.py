"""Host memory that a node shares with its clients: one sparse in-memory file, cut into frames.

Only the node decides what a frame holds. A client maps the same file. It copies into frames that it
reserved and out of frames that it leased. The file has room for every frame that the node's
capacity allows, but only frames in use take memory.
"""

import fcntl
import mmap
import os

import torch

from tiers.blocks.frames import Frame
from tiers.blocks.layout import BlockLayout
from tiers.node.capacity import Capacity


def frame_stride(layout: BlockLayout) -> int:
    """Bytes from one frame to the next: the size of a block, rounded up to whole pages."""
    return -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemory:
    """`num_frames` frames in a mapping of an open memory file. The node and each client have
    one."""

    def __init__(self, file: int, layout: BlockLayout, num_frames: int) -> None:
        self.file = file
        self.layout = layout
        self.num_frames = num_frames
        self.stride = frame_stride(layout)
        self._map = mmap.mmap(file, self.stride * num_frames)
        self.rows = torch.frombuffer(self._map, dtype=torch.uint8).view(num_frames, self.stride)

    def tensor(self, number: int) -> torch.Tensor:
        block = self.rows[number, : self.layout.nbytes]
        return block.view(self.layout.torch_dtype).view(self.layout.shape)

    def buffer(self, number: int) -> memoryview:
        start = self.stride * number
        return memoryview(self._map)[start : start + self.layout.nbytes]

    def give_back(self, number: int) -> None:
        """Return the frame's memory to the system. The frame reads as zeros afterwards."""
        self._map.madvise(mmap.MADV_REMOVE, number * self.stride, self.stride)

    def close(self) -> None:
        """Close the file. The mapping is freed once nothing refers to it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def create(layout: BlockLayout, num_frames: int) -> SharedMemory:
    """New memory. It has a name for people to see; only its descriptor opens it.

    Its length is sealed. A client that shortened it would kill the node and all clients by SIGBUS.
    """
    file = os.memfd_create("cachesvc-node", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, frame_stride(layout) * num_frames)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )
    return SharedMemory(file, layout, num_frames)


class SharedArena:
    """An `Arena` over shared memory, within a capacity that several layouts share."""

    def __init__(self, memory: SharedMemory, capacity: Capacity) -> None:
        self.memory = memory
        self.num_frames = memory.num_frames
        self.stride = memory.stride
        self._capacity = capacity
        self._free: list[int] = []
        self._fresh = 0  # frames from this number on were never used

    @property
    def num_free(self) -> int:
        """Frames of the file that no block has. The capacity may allow fewer."""
        return self.num_frames - self._fresh + len(self._free)

    def take(self) -> Frame | None:
        if not self.num_free or not self._capacity.reserve(self.stride):
            return None
        if self._free:
            return Frame(self, self._free.pop())
        self._fresh += 1
        return Frame(self, self._fresh - 1)

    def give(self, frame: Frame) -> None:
        """Give a frame back, and its memory to the system."""
        self._free.append(frame.number)
        self.memory.give_back(frame.number)
        self._capacity.used_bytes -= self.stride

    def reuse(self, frame: Frame) -> Frame | None:
        """The same frame if it is of this layout. Otherwise its memory may be enough for one."""
        if frame.memory is self:
            return frame
        assert isinstance(frame.memory, SharedArena)
        frame.memory.give(frame)
        return self.take()

    def tensor(self, number: int) -> torch.Tensor:
        return self.memory.tensor(number)

    def buffer(self, number: int) -> memoryview:
        return self.memory.buffer(number)
