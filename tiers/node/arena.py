"""Host memory that a node shares with its clients: one sparse file in memory, cut into frames.

The node alone decides what a frame holds. A client maps the same file and copies into the frames
that it reserved, and out of those that it leased. The file has room for every frame that the node's
capacity allows; only frames in use take memory.
"""

import fcntl
import mmap
import os

import torch

from tiers.blocks.frames import Frame
from tiers.blocks.layout import BlockLayout


def frame_stride(layout: BlockLayout) -> int:
    """Bytes from one frame to the next: a block, rounded up to whole pages."""
    return -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemory:
    """`num_frames` frames in a mapping of an open memory file. Node and client each have one."""

    def __init__(self, file: int, layout: BlockLayout, num_frames: int) -> None:
        self.file = file
        self.layout = layout
        self.num_frames = num_frames
        self.stride = frame_stride(layout)
        self._map = mmap.mmap(file, self.stride * num_frames)
        self.rows = torch.frombuffer(self._map, dtype=torch.uint8).view(num_frames, self.stride)

    def frame(self, number: int) -> Frame:
        """The frame as the tiers below know it."""
        return Frame(self, number)

    def tensor(self, number: int) -> torch.Tensor:
        block = self.rows[number, : self.layout.nbytes]
        return block.view(self.layout.torch_dtype).view(self.layout.shape)

    def buffer(self, number: int) -> memoryview:
        start = self.stride * number
        return memoryview(self._map)[start : start + self.layout.nbytes]

    def give_back(self, number: int) -> None:
        """Return the frame's memory to the system; it reads as zeros from now on."""
        self._map.madvise(mmap.MADV_REMOVE, number * self.stride, self.stride)

    def close(self) -> None:
        """Let go of the file. The mapping goes when nothing looks into it any more."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def create(layout: BlockLayout, num_frames: int) -> SharedMemory:
    """New memory, named for the process list and reachable through its descriptor alone.

    Its length is sealed: a client that cut it would end the node and all clients by SIGBUS.
    """
    file = os.memfd_create("cachesvc-node", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, frame_stride(layout) * num_frames)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )
    return SharedMemory(file, layout, num_frames)
