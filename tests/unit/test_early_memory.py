"""A start takes memory ahead of the tiers, within bounds, and gives it back to them."""

import sys
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from cachesvc.config.sections import CacheSection
from cachesvc.serve import _first_bytes
from cachesvc.server import early_memory
from cachesvc.server.early_memory import taken_early
from tests.bench.inside import resident_bytes
from tiers.blocks.lazy_memory import AHEAD_BYTES, LazyMemory

MIB = 1 << 20
Bytes = NDArray[np.uint8]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list["weakref.ref[Bytes]"]:
    """What is taken, as long as it is."""
    found: list[weakref.ref[Bytes]] = []

    class Noted(LazyMemory):
        def __init__(self, num_bytes: int) -> None:
            super().__init__(num_bytes)
            found.append(weakref.ref(self.memory))

    monkeypatch.setattr(early_memory, "LazyMemory", Noted)
    return found


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.002)


def size(taken: list["weakref.ref[Bytes]"]) -> int:
    memory = taken[0]() if taken else None
    return 0 if memory is None else resident_bytes(memory.ctypes.data, memory.nbytes)


def test_it_is_taken_while_the_block_runs(taken: list["weakref.ref[Bytes]"]) -> None:
    with taken_early(5 * MIB):
        until(lambda: 5 * MIB == size(taken))
    assert taken[0]() is None


def test_no_more_is_taken_once_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = []

    def touch(*piece: int) -> None:
        pieces.append(piece)
        time.sleep(0.01)

    monkeypatch.setattr(early_memory.ctypes, "memset", touch)
    monkeypatch.setattr(early_memory, "_bounded", lambda num_bytes: num_bytes)
    with taken_early(1 << 30):
        until(lambda: bool(pieces))
    assert 0 < len(pieces) < (1 << 30) / early_memory.PIECE_BYTES


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
def test_a_quarter_of_what_there_is_at_most(
    limit: int | None, available: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mib(number: int | None) -> int | None:
        return None if number is None else number * MIB

    monkeypatch.setattr(early_memory, "memory_limit", lambda: mib(limit))
    monkeypatch.setattr(early_memory, "available_bytes", lambda: mib(available))
    assert expected * MIB == early_memory._bounded(64 * MIB)


def test_a_system_that_grants_none_is_left_alone() -> None:
    assert 0 == len(early_memory._memory(1 << 62))
    with taken_early(0):
        pass


def test_what_the_tiers_touch_first_is_taken() -> None:
    assert 3 * AHEAD_BYTES == _first_bytes(CacheSection(host_bytes=AHEAD_BYTES + 1))
    sizes = CacheSection(device_bytes=3 * MIB, host_bytes=0, disk_bytes=0)
    assert 3 * MIB + AHEAD_BYTES == _first_bytes(sizes)
