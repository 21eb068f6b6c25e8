"""Host memory locked for a GPU's copies: whole, in pieces, and no more than was asked for."""

import logging

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.chain_runner import chain_layout
from tiers.blocks import frames
from tiers.blocks.frames import PAGE_BYTES, FrameArena, pin


class Cudart:
    """Keeps what is registered as CUDA does: no page twice. Refuses after `limit` bytes."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.pieces: dict[int, int] = {}
        self._limit = limit

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        pages = set(range(address // PAGE_BYTES, -(-(address + num_bytes) // PAGE_BYTES)))
        for begin, length in self.pieces.items():
            assert not pages & set(range(begin // PAGE_BYTES, -(-(begin + length) // PAGE_BYTES)))
        if sum(self.pieces.values()) + num_bytes > self._limit:
            return 2
        self.pieces[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pieces[address]
        return 0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PIN_BYTES", 4 * PAGE_BYTES)


def pages(count: int) -> NDArray[np.uint8]:
    memory = np.zeros((count + 1) * PAGE_BYTES, np.uint8)
    return memory[-memory.ctypes.data % PAGE_BYTES :][: count * PAGE_BYTES]


@pytest.mark.parametrize("stride", [1, 3, 4, 5, 9])
def test_all_bytes_are_locked_once_and_let_go(stride):
    memory, cudart, stride = pages(45), Cudart(), stride * PAGE_BYTES
    assert memory.nbytes == pin(memory, cudart, stride) == sum(cudart.pieces.values())
    frames._unpin(memory, memory.nbytes, cudart, stride)
    assert {} == cudart.pieces


def test_where_the_system_stops_the_rest_is_not_locked_and_it_is_said(caplog):
    memory, cudart = pages(40), Cudart(limit=10 * PAGE_BYTES)
    with caplog.at_level(logging.WARNING):
        pinned = pin(memory, cudart)
    assert 0 < pinned <= 10 * PAGE_BYTES
    assert "limit on locked memory" in caplog.text
    frames._unpin(memory, pinned, cudart, PAGE_BYTES)
    assert {} == cudart.pieces


@pytest.mark.parametrize("limit", [1 << 60, 33 * PAGE_BYTES])
@pytest.mark.parametrize("block_size", [4, 64, 200, 300, 1100])
def test_no_frame_lies_across_two_registrations(block_size, limit, monkeypatch):
    """A copy that spans two, or one and memory that is not registered, is an invalid argument."""
    cudart, layout = Cudart(limit), chain_layout(block_size)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    cleared: list[str] = []
    monkeypatch.setattr(frames, "clear_error", cleared.append)
    arena = FrameArena(layout, 60, "cuda")
    taken = [frame for frame in (arena.take() for _ in range(60)) if frame is not None]
    for frame in taken:
        begin = frame.tensor.data_ptr()
        assert begin == np.frombuffer(frame.buffer, np.uint8).ctypes.data
        inside = [
            first <= begin and begin + layout.nbytes <= first + length
            for first, length in cudart.pieces.items()
        ]
        apart = [
            begin + layout.nbytes <= first or first + length <= begin
            for first, length in cudart.pieces.items()
        ]
        assert any(inside) or all(apart)
        frame.tensor.fill_(frame.number)
    assert all(frame.tensor.eq(frame.number).all() for frame in taken)
    assert cleared == (["cuda"] if arena.num_pinned_bytes < 60 * arena.stride else [])


def test_an_arena_for_a_cpu_locks_nothing(monkeypatch):
    """Also where there is a GPU that another program uses."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert 0 == FrameArena(chain_layout(4), 3).num_pinned_bytes


def test_an_arena_for_a_gpu_is_locked_while_it_lives(monkeypatch):
    cudart, layout = Cudart(), chain_layout(4)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    arena = FrameArena(layout, 300, "cuda")
    assert 300 * PAGE_BYTES == arena.num_pinned_bytes == sum(cudart.pieces.values())
    del arena
    assert {} == cudart.pieces
