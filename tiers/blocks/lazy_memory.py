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
POPULATE_WRITE = 23  # Linux 5.14
AHEAD_BYTES = 256 << 20  # touched beyond what is used: prefixes of some 4,000 tokens, in 0.3 s

madvise = ctypes.CDLL(None, use_errno=True).madvise  # unlike mmap's, it releases the GIL
madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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

    def clear(self) -> None:
        """Touch what is touched at the start, by zeros. Nothing in it may be wanted yet."""
        self.memory[: self.at_start] = 0
        self.num_touched = self.at_start


def populate(address: int, num_bytes: int) -> bool:
    """Whether the pages from `address` on take memory now. Their contents do not change."""
    return not num_bytes or not madvise(address, num_bytes, POPULATE_WRITE)


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
