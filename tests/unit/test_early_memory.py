"""A start takes memory ahead of the tiers, within bounds, and it becomes theirs."""

import sys
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from cachesvc.config.sections import CacheSection
from cachesvc.serve import _first_bytes
from cachesvc.server import early_memory
from cachesvc.server.early_memory import taken_early
from tests.bench.inside import resident_bytes
from tiers.blocks import lazy_memory
from tiers.blocks.layout import BlockLayout
from tiers.blocks.lazy_memory import AHEAD_BYTES, HUGE_PAGE_BYTES, LazyMemory
from tiers.cache import CacheSettings, TieredCache

MIB = 1 << 20
LAYOUT = BlockLayout.uniform(
    num_layers=4, block_size=64, num_kv_heads=4, head_dim=64, dtype="float32"
)  # blocks of half a MiB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.002)


def size(lazy: LazyMemory) -> int:
    return resident_bytes(lazy.memory.ctypes.data, lazy.memory.nbytes)


def test_it_is_taken_while_the_block_runs():
    with taken_early(5 * MIB) as taken:
        until(lambda: 5 * MIB == taken.num_touched)
    assert 5 * MIB == size(taken)
    taken.give_back()
    assert 0 == size(taken) == taken.num_touched


def test_it_becomes_that_of_the_tiers_and_the_rest_is_given_back(monkeypatch):
    with taken_early(31 * MIB) as taken:
        until(lambda: 31 * MIB == taken.num_touched)
    taken.memory[:: 2 * MIB] = range(1, 17)  # of each page its number
    touched = []
    monkeypatch.setattr(lazy_memory, "populate", lambda _, size: touched.append(size) or True)
    sizes = CacheSettings(device_bytes=5 * MIB, host_bytes=16 * MIB)
    cache, copies = TieredCache(LAYOUT, sizes), LazyMemory(64 * MIB, limit=8 * MIB)
    with closing(cache):
        cache.touch([copies], taken=taken)
        cache.warm_up()
        assert 8 * MIB == size(copies)
        assert 0 == size(taken)
        pool, frames, _ = cache._toucher._lazy_memories
        numbers = [each.memory[:: 2 * MIB].tolist() for each in (pool, frames, copies)]
    assert [[14, 15, 0], [*range(6, 14)], [2, 3, 4, 5, *[0] * 28]] == numbers
    assert [MIB] == touched, "all but the end of the pool is there"


def test_where_pages_cannot_be_moved_the_tiers_touch_their_own(monkeypatch):
    monkeypatch.setattr(lazy_memory, "_mremap", lambda *_: -1)
    taken, lazy = LazyMemory(4 * MIB), LazyMemory(4 * MIB)
    taken.touch(4 * MIB)
    lazy.adopt(taken, 4 * MIB)
    assert (0, 4 * MIB) == (lazy.num_touched, taken.num_touched)


def test_no_more_is_taken_once_the_block_ends(monkeypatch):
    pieces = []

    def touch(*piece: int) -> None:
        pieces.append(piece)
        time.sleep(0.01)

    monkeypatch.setattr(early_memory.ctypes, "memset", touch)
    monkeypatch.setattr(early_memory, "_bounded", lambda num_bytes: num_bytes)
    with taken_early(1 << 30) as taken:
        until(lambda: bool(pieces))
    assert 0 < len(pieces) == taken.num_touched / HUGE_PAGE_BYTES < (1 << 30) / HUGE_PAGE_BYTES


@pytest.mark.parametrize(
    ("limit", "available", "expected"),
    [
        (None, None, 64),
        (None, 1024, 64),
        (128, 1024, 32),
        (1024, 128, 32),
        (None, 0, 0),
    ],
)
def test_a_quarter_of_what_there_is_at_most(limit, available, expected, monkeypatch):
    def mib(number: int | None) -> int | None:
        return None if number is None else number * MIB

    monkeypatch.setattr(early_memory, "memory_limit", lambda: mib(limit))
    monkeypatch.setattr(early_memory, "available_bytes", lambda: mib(available))
    assert expected * MIB == early_memory._bounded(64 * MIB)


def test_a_system_that_grants_none_is_left_alone():
    assert 0 == len(early_memory._memory(1 << 62).memory)
    with taken_early(0):
        pass


def test_what_the_tiers_touch_first_is_taken():
    assert 3 * AHEAD_BYTES == _first_bytes(CacheSection(host_bytes=AHEAD_BYTES + 1))
    sizes = CacheSection(device_bytes=3 * MIB, host_bytes=0, disk_bytes=0)
    assert 3 * MIB + AHEAD_BYTES == _first_bytes(sizes)
