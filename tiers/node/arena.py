"""Host memory that a node shares with its clients: one sparse in-memory file, cut into frames.

Only the node decides what a frame holds. A client maps the same file. It copies into frames that it
reserved and out of frames that it leased. The file has room for every frame that the node's
capacity allows, but only frames in use take memory, and a few spare ones (`tiers.node.spares`).
"""

import fcntl
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable

import torch

from tiers.blocks.frames import Arena, Frame
from tiers.blocks.layout import BlockLayout
from tiers.blocks.lazy_memory import madvise
from tiers.node.capacity import Capacity

PIECE_BYTES = 64 << 20  # a client locks so much at once


def frame_stride(layout: BlockLayout) -> int:
    """Bytes from one frame to the next: the size of a block, rounded up to whole pages."""
    return -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def piece_frames(layout: BlockLayout) -> int:
    """Frames that a client locks for its GPU together."""
    return max(1, PIECE_BYTES // frame_stride(layout))


class SharedMemory:
    """`num_frames` frames in a mapping of a memory file. Node and clients have one each."""

    def __init__(
        self, file: int, layout: BlockLayout, num_frames: int, piece_frames: int = 0
    ) -> None:
        """`piece_frames`: what a client may lock at once; 0 if the node does not offer it."""
        self.file = file
        self.layout = layout
        self.num_frames = num_frames
        self.piece_frames = piece_frames
        self.before_close: Callable[[], None] = lambda: None  # while the file is still open
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
        """Close the file. The mapping is freed once nothing refers to it.

        What this frees may be the node's whole memory, after its end. That takes 0.2 s a GB, in
        which this thread and others of the interpreter go on.
        """
        self.before_close()
        if self.file >= 0:
            file, self.file = self.file, -1
            begin, nbytes = self.rows.data_ptr(), self.stride * self.num_frames
            free = threading.Thread(target=_free, args=([self._map], begin, nbytes, file))
            free.daemon = True
            free.start()


def _free(held: list[mmap.mmap], begin: int, nbytes: int, file: int) -> None:
    """Unmaps pages and closes the file last: both calls release the GIL, and `mmap` does not."""
    madvise(begin, nbytes, mmap.MADV_DONTNEED)
    held.clear()
    os.close(file)


def create(layout: BlockLayout, num_frames: int) -> SharedMemory:
    """New memory. It has a name for people to see; only its descriptor opens it. Its length is
    sealed. A client that shortened it would kill the node and all clients by SIGBUS."""
    file = os.memfd_create("cachesvc-node", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, frame_stride(layout) * num_frames)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )
    return SharedMemory(file, layout, num_frames, piece_frames(layout))


class SharedArena(Arena):
    """Frames of shared memory, within a capacity that several layouts share.

    A client may lock pieces of it, `piece_frames` frames each, for its GPU. The GPU goes on using
    the pages that it was given, so a locked frame's memory never goes back to the system: the frame
    would get other pages, and GPU and node would see different bytes. Locked frames count as used,
    whoever has them, and serve this layout alone.
    """

    def __init__(self, memory: SharedMemory, capacity: Capacity) -> None:
        self.memory = memory
        self.num_frames = memory.num_frames
        self.stride = memory.stride
        self._capacity = capacity
        self._free: list[int] = []
        self._free_locked: list[int] = []
        self._spare: list[int] = []  # free, with memory
        self._fresh = 0  # frames from this number on were never used
        self._locks: Counter[int] = Counter()  # clients by piece
        capacity.spare_holders.append(self.drop_spares)

    @property
    def num_free(self) -> int:
        """Frames of the file that no block has. The capacity may allow fewer."""
        kept = len(self._free_locked) + len(self._spare)
        return self.num_frames - self._fresh + len(self._free) + kept

    @property
    def num_taken(self) -> int:
        return self.num_frames - self.num_free

    def take(self, *, lesser: bool = False) -> Frame | None:
        self._capacity.asker = self
        if self._free_locked:
            self._capacity.kept_bytes -= self.stride
            self._capacity.used_bytes += self.stride
            return Frame(self, self._free_locked.pop())
        if self._spare:
            self._capacity.drop_spare(self.stride)
            self._capacity.used_bytes += self.stride
            return Frame(self, self._spare.pop())
        fits = self._has_more and self._capacity.reserve(self.stride)
        return Frame(self, self._next()) if fits else None

    def untouched(self) -> int | None:
        """A free frame that gets its memory now, as a spare one. None if there are enough."""
        if not self._has_more or not self._capacity.keep_spare(self.stride):
            return None
        number = self._next()
        self._spare.insert(0, number)  # the last to be taken, which may be before it is touched
        return number

    def touched(self, number: int) -> None:
        """A frame from `untouched` has its memory now. It may have been given up meanwhile."""
        if number in self._free:
            self.memory.give_back(number)

    def drop_spares(self, num_bytes: int) -> int:
        """Give spare frames back to the system until that is so many bytes. Returns how many."""
        dropped = 0
        while self._spare and dropped < num_bytes:
            self._drop_spare(self._spare[-1])
            dropped += self.stride
        return dropped

    def give(self, frame: Frame) -> None:
        """Give a frame back, and its memory to the system unless it is locked."""
        self._capacity.used_bytes -= self.stride
        if self.is_locked(frame.number):
            self._free_locked.append(frame.number)
            self._capacity.kept_bytes += self.stride
            return
        self._free.append(frame.number)
        self.memory.give_back(frame.number)

    def reuse(self, frame: Frame, *, lesser: bool = False) -> Frame | None:
        """The same frame if it is of this layout. Otherwise its memory may be enough for one."""
        if frame.memory is self:
            return frame
        assert isinstance(frame.memory, SharedArena)
        frame.memory.give(frame)
        return self.take()

    def is_locked(self, number: int) -> bool:
        return bool(self._locks) and number // self.memory.piece_frames in self._locks

    def can_reuse(self, frame: Frame) -> bool:
        memory = frame.memory
        assert isinstance(memory, SharedArena)
        return memory is self or not memory.is_locked(frame.number)

    def lock(self, piece: int) -> bool:
        """A client is about to lock a piece. False if it may not: its free frames do not fit the
        capacity, or nothing would be left for other layouts."""
        if piece not in self._locks:
            frames = self._frames_of(piece)
            for number in [each for each in self._spare if each in frames]:
                self._drop_spare(number)
            self._use_up_to(frames.stop)
            free = {number for number in self._free if number in frames}
            if not self._capacity.lock(len(frames) * self.stride, len(free) * self.stride):
                return False
            self._free = [number for number in self._free if number not in free]
            self._free_locked += sorted(free, reverse=True)
        self._locks[piece] += 1
        return True

    def unlock(self, piece: int) -> None:
        """A client has unlocked a piece, or is gone with its mapping."""
        self._locks[piece] -= 1
        if self._locks[piece]:
            return
        del self._locks[piece]
        frames = self._frames_of(piece)
        self._capacity.locked_bytes -= len(frames) * self.stride
        for number in [each for each in self._free_locked if each in frames]:
            self._free_locked.remove(number)
            self._capacity.kept_bytes -= self.stride
            self._free.append(number)
            self.memory.give_back(number)

    def _frames_of(self, piece: int) -> range:
        size = self.memory.piece_frames
        return range(piece * size, min((piece + 1) * size, self.num_frames))

    @property
    def _has_more(self) -> bool:
        return bool(self._free) or self._fresh < self.num_frames

    def _next(self) -> int:
        """A free frame without memory."""
        if self._free:
            return self._free.pop()
        self._fresh += 1
        return self._fresh - 1

    def _drop_spare(self, number: int) -> None:
        self._spare.remove(number)
        self._capacity.drop_spare(self.stride)
        self._free.append(number)
        self.memory.give_back(number)

    def _use_up_to(self, end: int) -> None:
        """No frame below `end` counts as never used from now on."""
        self._free += range(end - 1, self._fresh - 1, -1)
        self._fresh = max(self._fresh, end)

    def check(self) -> None:
        """Assert that no frame is free twice, and that those that are free and locked are kept."""
        free = [*self._free, *self._free_locked, *self._spare]
        assert len(free) == len(set(free))
        assert not any(map(self.is_locked, self._spare))
        assert all(map(self.is_locked, self._free_locked))
        assert not any(map(self.is_locked, self._free))

    @property
    def num_locked_bytes(self) -> int:
        return sum(len(self._frames_of(piece)) for piece in self._locks) * self.stride

    def tensor(self, number: int) -> torch.Tensor:
        return self.memory.tensor(number)

    def buffer(self, number: int) -> memoryview:
        return self.memory.buffer(number)
