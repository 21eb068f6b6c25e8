"""Memory that is taken while the start imports and loads, and given back before the tiers need it.

The host of a virtual machine provides memory slowly, at 0.3 to 1 GB/s, and most of what a process
frees stays with the machine for some seconds. Then the tiers touch it at ten times that rate. They
cannot take it themselves so early: their sizes depend on the model.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cachesvc.server.spare_memory import available_bytes
from engine.cgroups import memory_limit
from tiers.blocks.lazy_memory import LazyMemory
from tiers.transfer.niceness import be_nice

PIECE_BYTES = 2 << 20  # a huge page
SHARE = 1 / 4  # of the memory that this process may have: loading needs some, too


@contextmanager
def taken_early(num_bytes: int) -> Iterator[None]:
    """Take up to so many bytes while the block runs, with time that nothing else uses."""
    done = threading.Event()
    thread = threading.Thread(
        target=_take, args=(_bounded(num_bytes), done), name="cachesvc-early", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _take(num_bytes: int, done: threading.Event) -> None:
    be_nice(19)
    try:
        memory = LazyMemory(num_bytes).memory
    except MemoryError:
        return  # the tiers will say so
    for start in range(0, num_bytes, PIECE_BYTES):
        if done.is_set():
            return
        # Without the GIL, and without the lock of the process's mappings, which imports need.
        ctypes.memset(memory.ctypes.data + start, 0, min(PIECE_BYTES, num_bytes - start))
    done.wait()


def _bounded(num_bytes: int) -> int:
    bounds = [bound for bound in (memory_limit(), available_bytes()) if bound is not None]
    return min([num_bytes, *(int(SHARE * bound) for bound in bounds)])
