"""Memory that is taken while the start imports and loads, for the tiers.

The host of a virtual machine provides memory slowly, at 0.3 to 1 GB/s. The tiers cannot take it
themselves so early, because their sizes depend on the model. So its pages are moved to theirs.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cachesvc.server.spare_memory import available_bytes
from engine.cgroups import memory_limit
from tiers.blocks.lazy_memory import HUGE_PAGE_BYTES, LazyMemory
from tiers.transfer.niceness import be_nice

SHARE = 1 / 4  # of the memory that this process may have: loading needs some, too


@contextmanager
def taken_early(num_bytes: int) -> Iterator[LazyMemory]:
    """Take up to so many bytes while the block runs, with time that little else uses. Afterwards
    they are the caller's."""
    taken, done = _memory(_bounded(num_bytes)), threading.Event()
    thread = threading.Thread(target=_take, args=(taken, done), name="cachesvc-early", daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        done.set()
        thread.join()


def _take(taken: LazyMemory, done: threading.Event) -> None:
    # Beside busy processes, the last of all priorities would take a second for a piece.
    be_nice(10)
    for start in range(0, len(taken.memory), HUGE_PAGE_BYTES):
        if done.is_set():
            return
        piece = taken.memory[start : start + HUGE_PAGE_BYTES]
        # Without the GIL, and without the lock of the process's mappings, which imports need.
        ctypes.memset(piece.ctypes.data, 0, piece.nbytes)
        taken.num_touched += piece.nbytes


def _memory(num_bytes: int) -> LazyMemory:
    try:
        return LazyMemory(num_bytes)
    except MemoryError:  # the tiers will say so
        return LazyMemory(0)


def _bounded(num_bytes: int) -> int:
    bounds = [bound for bound in (memory_limit(), available_bytes()) if bound is not None]
    return min([num_bytes, *(int(SHARE * bound) for bound in bounds)])
