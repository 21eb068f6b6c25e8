"""Memory that is taken while the start imports and loads, and given back before the tiers need it.

The host of a virtual machine provides memory slowly, at 0.3 to 1 GB/s, and most of what a process
frees stays with the machine for some seconds. Then the tiers touch it at ten times that rate. They
cannot take it themselves so early: their sizes depend on the model.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from cachesvc.server.spare_memory import available_bytes
from engine.cgroups import memory_limit
from tiers.blocks.lazy_memory import LazyMemory
from tiers.transfer.niceness import be_nice

PIECE_BYTES = 2 << 20  # a huge page
SHARE = 1 / 4  # of the memory that this process may have: loading needs some, too


@contextmanager
def taken_early(num_bytes: int) -> Iterator[None]:
    """Take up to so many bytes while the block runs, with time that little else uses."""
    memory, done = _memory(_bounded(num_bytes)), threading.Event()
    thread = threading.Thread(target=_take, args=(memory, done), name="cachesvc-early", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()  # then this thread gives the memory back: the other one is too slow for it


def _take(memory: NDArray[np.uint8], done: threading.Event) -> None:
    # Beside busy processes, the last of all priorities would take a second for a piece.
    be_nice(10)
    for start in range(0, len(memory), PIECE_BYTES):
        if done.is_set():
            return
        piece = memory[start : start + PIECE_BYTES]
        # Without the GIL, and without the lock of the process's mappings, which imports need.
        ctypes.memset(piece.ctypes.data, 0, piece.nbytes)


def _memory(num_bytes: int) -> NDArray[np.uint8]:
    try:
        return LazyMemory(num_bytes).memory
    except MemoryError:  # the tiers will say so
        return LazyMemory(0).memory


def _bounded(num_bytes: int) -> int:
    bounds = [bound for bound in (memory_limit(), available_bytes()) if bound is not None]
    return min([num_bytes, *(int(SHARE * bound) for bound in bounds)])
