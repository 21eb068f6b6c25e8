"""Host memory locked for a GPU's copies: whole, in pieces, and no more than was asked for."""

import logging

import numpy as np
import pytest

from engine.testing.chain_runner import chain_layout
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


@pytest.mark.parametrize("offset", [0, 1, 16, PAGE_BYTES - 1])
def test_all_bytes_are_locked_once_and_let_go(offset: int) -> None:
    memory = np.zeros(40 * PAGE_BYTES + offset + 7, np.uint8)[offset:]
    cudart = Cudart()
    assert memory.nbytes == pin(memory, cudart) == sum(cudart.pieces.values())
    frames._unpin(memory, memory.nbytes, cudart)
    assert {} == cudart.pieces


def test_where_the_system_stops_the_rest_is_not_locked_and_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory, cudart = np.zeros(40 * PAGE_BYTES, np.uint8), Cudart(limit=10 * PAGE_BYTES)
    with caplog.at_level(logging.WARNING):
        pinned = pin(memory, cudart)
    assert 0 < pinned <= 10 * PAGE_BYTES
    assert "limit on locked memory" in caplog.text
    frames._unpin(memory, pinned, cudart)
    assert {} == cudart.pieces


def test_an_arena_for_a_cpu_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is a GPU that another program uses."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert 0 == FrameArena(chain_layout(4), 3).num_pinned_bytes


def test_an_arena_for_a_gpu_is_locked_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart, layout = Cudart(), chain_layout(4)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    arena = FrameArena(layout, 300, "cuda")
    assert 300 * layout.nbytes == arena.num_pinned_bytes == sum(cudart.pieces.values())
    del arena
    assert {} == cudart.pieces
