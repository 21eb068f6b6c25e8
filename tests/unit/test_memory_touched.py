"""Memory is taken as it is used, and touched ahead of need without a change to what it holds."""

import gc
import sys
import threading
import time
import weakref
from contextlib import closing

import numpy as np
import pytest

from engine.attention.copies import FreeRanges, WorkingCopies
from engine.attention.kv_pool import KvPool
from tests.bench.inside import resident_bytes
from tiers.blocks import reserve as reserve_module
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.blocks.reserve import AHEAD_BYTES, Reserve
from tiers.memory.device import DevicePool
from tiers.transfer.toucher import Toucher

MIB = 1 << 20
LAYOUT = BlockLayout.uniform(
    num_layers=4, block_size=64, num_kv_heads=4, head_dim=64, dtype="float32"
)  # blocks of half a MiB
FULL, SLIDING = LayerLayout(1, 8, 8), LayerLayout(1, 8, 8, window=40)
CUT = BlockLayout((FULL, SLIDING, SLIDING, SLIDING), 16, "float32")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Used:
    """A reserve of which the first `num_bytes` are in use."""

    def __init__(self, size: int, **limits: int) -> None:
        self.num_bytes = 0
        self.reserve = Reserve(size, lambda: self.num_bytes, **limits)


def resident(reserve: Reserve) -> int:
    return resident_bytes(reserve.memory.ctypes.data, reserve.memory.nbytes)


def until(reserve: Reserve, touched: int) -> None:
    end = time.monotonic() + 20
    while reserve.num_touched < touched:
        assert time.monotonic() < end, f"{reserve.num_touched} of {touched} bytes are touched"
        time.sleep(0.002)


def test_pools_and_working_copies_take_no_memory_when_they_are_made() -> None:
    pool, arena = DevicePool(LAYOUT, 1024), FrameArena(LAYOUT, 1024)
    copies = WorkingCopies(KvPool(pool.tensor), budget_bytes=512 * MIB)
    for reserve in (pool.reserve, arena.reserve, copies.reserve):
        assert reserve is not None and 512 * MIB == reserve.memory.nbytes
        assert resident(reserve) < 4 * MIB
    assert not pool.tensor[-1].any()
    assert 128 * MIB == copies.reserve.limit, "ended copies take a quarter"


def test_memory_goes_with_its_owner() -> None:
    pool, arena = DevicePool(LAYOUT, 8), FrameArena(LAYOUT, 8)
    copies = WorkingCopies(KvPool(pool.tensor), budget_bytes=MIB)
    left = [weakref.ref(each.reserve) for each in (pool, arena, copies) if each.reserve is not None]
    gc.disable()
    del pool, arena, copies
    assert 3 * [None] == [each() for each in left]
    gc.enable()


def test_memory_is_touched_ahead_of_need() -> None:
    used = Used(4 * AHEAD_BYTES)
    reserve, toucher = used.reserve, Toucher([used.reserve])
    toucher.start()
    with closing(toucher):
        assert AHEAD_BYTES == reserve.num_touched <= resident(reserve)
        used.num_bytes = 100 * MIB
        toucher.rest()
        until(reserve, AHEAD_BYTES + 100 * MIB)
        used.num_bytes = 3 * AHEAD_BYTES + 1
        toucher.step()
        until(reserve, 3 * AHEAD_BYTES + AHEAD_BYTES // 2)
        toucher.rest()
        until(reserve, 4 * AHEAD_BYTES)
        toucher._thread.join(20)
        assert not toucher._thread.is_alive(), "nothing is left to touch"


def test_the_thread_rests_while_the_engine_computes_and_enough_is_touched() -> None:
    used = Used(4 * AHEAD_BYTES)
    toucher = Toucher([used.reserve])
    toucher.start()
    with closing(toucher):
        used.num_bytes = AHEAD_BYTES // 2
        toucher.step()
        toucher._wake.set()
        time.sleep(0.05)
        assert AHEAD_BYTES == used.reserve.num_touched
        toucher.rest()
        until(used.reserve, AHEAD_BYTES + AHEAD_BYTES // 2)


def test_no_more_than_the_limit_is_touched() -> None:
    used = Used(64 * MIB, limit=16 * MIB)
    used.num_bytes = 40 * MIB
    toucher = Toucher([used.reserve])
    toucher.start()
    toucher._thread.join(20)
    assert 16 * MIB == used.reserve.num_touched
    assert resident(used.reserve) <= 18 * MIB


def test_what_is_written_while_memory_is_touched_stays() -> None:
    used = Used(64 * MIB)
    reserve, done = used.reserve, threading.Event()
    words = reserve.memory.view(np.int64)

    def count() -> None:
        while not done.is_set():
            words[::512] += 1

    writer = threading.Thread(target=count)
    writer.start()
    while reserve.num_touched < reserve.limit:
        assert reserve.touch(64 << 10)
    done.set()
    writer.join()
    assert words[0] > 0 and (words[::512] == words[0]).all()


def test_where_the_system_cannot_touch_what_is_used_first_is_touched_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserve_module, "madvise", lambda *_: -1)
    pool, frames = Used(32 * MIB), Used(32 * MIB, at_start=8 * MIB)
    toucher = Toucher([pool.reserve, frames.reserve])
    toucher.start()
    with closing(toucher):
        assert 32 * MIB == resident(pool.reserve)
        assert 8 * MIB == frames.reserve.num_touched <= resident(frames.reserve) <= 10 * MIB
        toucher.step()
        toucher.rest()


@pytest.mark.parametrize("layout", [LAYOUT, CUT])
def test_slots_and_frames_that_were_never_used_come_last(layout: BlockLayout) -> None:
    pool, arena = DevicePool(layout, 6), FrameArena(layout, 6)
    assert pool.reserve is not None
    slots, frames = [pool.take() for _ in range(3)], [arena.take() for _ in range(3)]
    assert 0 < pool.reserve.num_used() <= pool.reserve.memory.nbytes // 2
    assert arena.reserve.memory.nbytes // 2 == arena.reserve.num_used()
    assert slots[1] is not None and frames[1] is not None
    pool.give(slots[1])
    arena.give(frames[1])
    assert arena.reserve.memory.nbytes // 3 == arena.reserve.num_used()
    again, frame = pool.take(), arena.take()
    assert again == slots[1] and frame is not None and frame.number == frames[1].number


def test_where_the_free_end_of_the_copies_begins() -> None:
    ranges = FreeRanges(10)
    assert 0 == ranges.end
    first, second = ranges.take(4, 10), ranges.take(6, 10)
    assert (0, 4) == (first, second)
    assert 10 == ranges.end
    ranges.give(0, 4)
    assert 10 == ranges.end
    ranges.give(4, 6)
    assert 0 == ranges.end
