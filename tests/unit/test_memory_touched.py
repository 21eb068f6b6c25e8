"""Memory is taken as it is used, and touched ahead of need without a change to what it holds."""

import gc
import os
import sys
import threading
import time
import weakref
from array import array
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from engine.attention.copies import WorkingCopies
from engine.attention.kv_pool import KvPool
from tests.patience import until
from tests.support.threads import beside, ending
from tiers.blocks import lazy_memory as lazy_memory_module
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.blocks.lazy_memory import AHEAD_BYTES, LazyMemory
from tiers.memory.device import DevicePool
from tiers.transfer.toucher import Toucher

MIB = 1 << 20
LAYOUT = BlockLayout.uniform(
    num_layers=4, block_size=64, num_kv_heads=4, head_dim=64, dtype="float32"
)  # blocks of half a MiB
FULL, SLIDING = LayerLayout(1, 8, 8), LayerLayout(1, 8, 8, window=40)
CUT = BlockLayout((FULL, SLIDING, SLIDING, SLIDING), 16, "float32")

PAGE = os.sysconf("SC_PAGE_SIZE")
PRESENT = 1 << 63  # of a page's 8 bytes in /proc/self/pagemap

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of the range that are in memory."""
    first, last = address // PAGE, -(-(address + num_bytes) // PAGE)
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = array("Q", pages.read(8 * (last - first)))
    return PAGE * sum(1 for entry in entries if entry & PRESENT)


class Used:
    """Lazy memory of which the first `num_bytes` are in use."""

    def __init__(self, size: int, **limits: int) -> None:
        self.num_bytes = 0
        self.lazy_memory = LazyMemory(size, lambda: self.num_bytes, **limits)


def resident(lazy: LazyMemory) -> int:
    return resident_bytes(lazy.memory.ctypes.data, lazy.memory.nbytes)


def test_pools_and_working_copies_take_no_memory_when_they_are_made():
    pool, arena = DevicePool(LAYOUT, 1024), FrameArena(LAYOUT, 1024)
    copies = WorkingCopies(KvPool(pool.tensor), budget_bytes=512 * MIB)
    for lazy in (pool.lazy_memory, arena.lazy_memory, copies.lazy_memory):
        assert lazy is not None and 512 * MIB == lazy.memory.nbytes
        assert resident(lazy) < 4 * MIB
    assert not pool.tensor[-1].any()
    assert 128 * MIB == copies.lazy_memory.limit, "ended copies take a quarter"


def test_memory_is_new_though_much_was_freed():
    np.empty(31 * MIB, np.uint8)  # once freed, malloc keeps others of that size to hand them out
    freed = [np.ones(30 * MIB, np.uint8) for _ in range(5)]
    kept = bytes(100_000)  # behind them, so that they cannot be given back to the system
    del freed
    lazy = LazyMemory(64 * MIB)
    assert not resident(lazy)
    assert not lazy.memory.any() and kept


def test_memory_goes_with_its_owner():
    pool, arena = DevicePool(LAYOUT, 8), FrameArena(LAYOUT, 8)
    copies = WorkingCopies(KvPool(pool.tensor), budget_bytes=MIB)
    left = [
        weakref.ref(each.lazy_memory)
        for each in (pool, arena, copies)
        if each.lazy_memory is not None
    ]
    gc.disable()
    del pool, arena, copies
    assert 3 * [None] == [each() for each in left]
    gc.enable()


def test_more_memory_than_can_be_promised_is_an_error():
    with pytest.raises(MemoryError, match="the system has no"):
        LazyMemory(1 << 62)


def test_memory_is_touched_ahead_of_need():
    used = Used(4 * AHEAD_BYTES)
    lazy, toucher = used.lazy_memory, Toucher([used.lazy_memory])
    toucher.start()
    toucher.wait()
    with closing(toucher):
        assert AHEAD_BYTES == lazy.num_touched <= resident(lazy)
        used.num_bytes = 100 * MIB
        toucher.rest()
        until(lambda: lazy.num_touched >= AHEAD_BYTES + 100 * MIB)
        used.num_bytes = 3 * AHEAD_BYTES + 1
        toucher.step()
        until(lambda: lazy.num_touched >= 3 * AHEAD_BYTES + AHEAD_BYTES // 2)
        toucher.rest()
        until(lambda: lazy.num_touched >= 4 * AHEAD_BYTES)
        toucher._thread.join(20)
        assert not toucher._thread.is_alive(), "nothing is left to touch"


def test_the_thread_rests_while_the_engine_computes_and_enough_is_touched():
    used = Used(4 * AHEAD_BYTES)
    toucher = Toucher([used.lazy_memory])
    toucher.start()
    toucher.wait()
    with closing(toucher):
        used.num_bytes = AHEAD_BYTES // 2
        toucher.step()
        toucher._wake.set()
        time.sleep(0.05)
        assert AHEAD_BYTES == used.lazy_memory.num_touched
        toucher.rest()
        until(lambda: used.lazy_memory.num_touched >= AHEAD_BYTES + AHEAD_BYTES // 2)


def test_what_is_written_while_memory_is_touched_stays():
    used = Used(64 * MIB)
    lazy, done = used.lazy_memory, threading.Event()
    words = lazy.memory.view(np.int64)

    def count() -> None:
        while not done.is_set():
            words[::512] += 1

    with beside(count), ending(done):
        while lazy.num_touched < lazy.limit:
            assert lazy.touch(64 << 10)
    assert words[0] > 0 and (words[::512] == words[0]).all()


def test_where_the_system_cannot_touch_what_is_used_first_is_touched_at_the_start(monkeypatch):
    monkeypatch.setattr(lazy_memory_module, "madvise", lambda *_: -1)
    pool, frames = Used(32 * MIB), Used(32 * MIB, at_start=8 * MIB)
    toucher = Toucher([pool.lazy_memory, frames.lazy_memory])
    toucher.start()
    toucher.wait()
    with closing(toucher):
        assert 32 * MIB == resident(pool.lazy_memory)
        assert 8 * MIB == frames.lazy_memory.num_touched <= resident(frames.lazy_memory) <= 10 * MIB
        toucher.step()
        toucher.rest()


@pytest.mark.parametrize("layout", [LAYOUT, CUT])
def test_slots_and_frames_that_were_never_used_come_last(layout):
    pool, arena = DevicePool(layout, 6), FrameArena(layout, 6)
    slots, frames = [pool.take() for _ in range(3)], [arena.take() for _ in range(3)]
    assert 0 < pool.lazy_memory.num_used() <= pool.lazy_memory.memory.nbytes // 2
    assert arena.lazy_memory.memory.nbytes // 2 == arena.lazy_memory.num_used()
    pool.give(slots[1])
    arena.give(frames[1])
    assert arena.lazy_memory.memory.nbytes // 3 == arena.lazy_memory.num_used()
    again, frame = pool.take(), arena.take()
    assert again == slots[1] and frame is not None and frame.number == frames[1].number
