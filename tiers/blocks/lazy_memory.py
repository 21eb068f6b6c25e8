"""Memory that the system has promised but not handed out yet: it does so when it is touched.

A virtual machine provides fresh memory at about 1 GB/s, slower than a prefix is loaded from disk.
So what will be used next is touched ahead of need (`tiers.transfer.toucher`).
"""

import contextlib
import ctypes
import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
DONT_NEED = 4
POPULATE_WRITE = 23  # Linux 5.14
MOVE_PAGES = 1 | 2 | 4  # may move, to this address, and leave the old one mapped: Linux 5.7
AHEAD_BYTES = 256 << 20  # touched beyond what is used: prefixes of some 4,000 tokens, in 0.3 s

madvise = ctypes.CDLL(None, use_errno=True).madvise  # unlike mmap's, it releases the GIL
madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mremap = getattr(ctypes.CDLL(None), "mremap", None)  # Linux has it


class LazyMemory:
    """Zeros in huge pages if available, which begin on one, and are used from the start on.

    Invariant: the first `num_touched` bytes take memory, and those that `num_used` counts are the
    first or were used before. `limit` is how many are touched ahead of need; `at_start`, how many
    are touched at the start where that cannot be done later.
    """

    def __init__(
        self,
        num_bytes: int,
        num_used: Callable[[], int] = lambda: 0,
        *,
        limit: int | None = None,
        at_start: int | None = None,
    ) -> None:
        """Any thread may call `num_used`. Raises MemoryError."""
        self.memory = _mapping(num_bytes)
        self.num_used = num_used
        self.num_touched = 0
        self.limit = num_bytes if limit is None else limit
        self.at_start = self.limit if at_start is None else min(at_start, self.limit)

    def lacks(self, ahead: int) -> bool:
        """Whether fewer than `ahead` bytes beyond those in use are touched."""
        return self.num_touched < min(self.limit, self.num_used() + ahead)

    def touch(self, num_bytes: int) -> bool:
        """Touch so many bytes more, at most. What they hold does not change, whoever writes to them
        meanwhile. False if the system cannot do that."""
        start, end = self.num_touched, min(self.limit, self.num_touched + num_bytes)
        if not populate(self.memory.ctypes.data + start, end - start):
            return False
        self.num_touched = end
        return True

    def adopt(self, other: "LazyMemory", num_bytes: int) -> None:
        """Take over so many bytes that `other` has touched, at most, in whole huge pages. Both hold
        zeros, and nobody uses them yet. Nothing happens where the system cannot move pages."""
        touched = _whole(other.num_touched)
        num_bytes = min(_whole(min(self.limit, num_bytes)), touched)
        start = touched - num_bytes
        if num_bytes and _move(
            other.memory.ctypes.data + start, num_bytes, self.memory.ctypes.data
        ):
            self.num_touched, other.num_touched = num_bytes, start

    def give_back(self) -> None:
        """Return what takes memory to the system. It holds zeros again."""
        madvise(self.memory.ctypes.data, self.memory.nbytes, DONT_NEED)
        self.num_touched = 0

    def clear(self) -> None:
        """Touch what is touched at the start, by zeros. Nothing in it may be wanted yet."""
        self.memory[: self.at_start] = 0
        self.num_touched = self.at_start


def populate(address: int, num_bytes: int) -> bool:
    """Whether the pages from `address` on take memory now. Their contents do not change."""
    return not num_bytes or not madvise(address, num_bytes, POPULATE_WRITE)


def _whole(num_bytes: int) -> int:
    """What of it is whole huge pages."""
    return num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def _move(address: int, num_bytes: int, to: int) -> bool:
    """Whether the pages are at the other address now."""
    if _mremap is None:
        return False
    size = ctypes.c_size_t(num_bytes)
    _mremap.restype = ctypes.c_void_p
    moved = _mremap(ctypes.c_void_p(address), size, size, MOVE_PAGES, ctypes.c_void_p(to))
    return bool(moved == to)


def _mapping(num_bytes: int) -> NDArray[np.uint8]:
    """Of the system itself: malloc would hand out what others freed, which takes memory already.

    In huge pages: the first touch of 190 MiB took 0.30 s in pages of 4 KiB and 0.02 s in huge ones
    (two cores of a virtual machine). The first hits after a start would wait for it.
    """
    try:
        mapping = mmap.mmap(
            -1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except OSError as error:
        raise MemoryError(f"the system has no {num_bytes} bytes: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]
