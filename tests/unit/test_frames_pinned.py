"""Host memory locked for a GPU: whole, in pieces, no more than asked for, and beside it."""

import logging
import os
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.chain_runner import chain_layout
from tests.support.threads import beside
from tiers.blocks import frames, numa
from tiers.blocks.frames import PAGE_BYTES, FrameArena, pci_address, pin
from tiers.blocks.numa import cpus_beside, running_on


class Cudart:
    """Keeps what is registered as CUDA does: no page twice. Refuses after `limit` bytes."""

    def __init__(self, limit=1 << 60):
        self.pieces = {}
        self._limit = limit

    def cudaHostRegister(self, address, num_bytes, flags):
        pages = set(range(address // PAGE_BYTES, -(-(address + num_bytes) // PAGE_BYTES)))
        for begin, length in self.pieces.items():
            assert not pages & set(range(begin // PAGE_BYTES, -(-(begin + length) // PAGE_BYTES)))
        if sum(self.pieces.values()) + num_bytes > self._limit:
            return 2
        self.pieces[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        del self.pieces[address]
        return 0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(frames, "PIN_BYTES", 4 * PAGE_BYTES)


def pages(count):
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
    cleared = []
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


PCI = "0000:3b:00.0"


def machine(root, node, cpulist):
    """A /sys of a machine with a GPU on a node."""
    device, nodes = root / "bus/pci/devices" / PCI, root / "devices/system/node/node1"
    device.mkdir(parents=True)
    nodes.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (nodes / "cpulist").write_text(f"{cpulist}\n")
    return root


@pytest.mark.parametrize(
    ("cpulist", "expected"),
    [("16-18,48", {16, 17, 18, 48}), ("3", {3}), ("", set()), ("a-b", set())],
)
def test_the_processors_of_a_gpus_node(tmp_path, cpulist, expected):
    assert expected == cpus_beside(PCI, machine(tmp_path, "1", cpulist))


@pytest.mark.parametrize("node", ["-1", "7", "none", ""])
def test_without_a_known_node_there_are_none(tmp_path, node):
    assert frozenset() == cpus_beside(PCI, machine(tmp_path, node, "0-3"))
    assert frozenset() == cpus_beside("0000:00:00.0", tmp_path)
    assert frozenset() == cpus_beside("", tmp_path)


def test_a_thread_runs_there_for_a_while_and_alone():
    before = os.sched_getaffinity(0)
    one, main = frozenset({min(before)}), os.getpid()
    found = []
    with running_on(one):
        assert one == os.sched_getaffinity(0)
        with beside(lambda: found.append(os.sched_getaffinity(main))):
            pass
    with pytest.raises(RuntimeError), running_on(one):
        raise RuntimeError
    assert before == os.sched_getaffinity(0)
    with running_on(frozenset({max(before) + 4096})):
        assert before == os.sched_getaffinity(0), "none of them is ours"
    assert [one] == found, "of the thread that asked"


def test_a_container_that_forbids_it_changes_nothing(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", Mock(side_effect=PermissionError))
    before = os.sched_getaffinity(0)
    with running_on(frozenset({min(before)})):
        assert before == os.sched_getaffinity(0)


def test_an_arena_is_pinned_by_a_thread_beside_the_gpu(tmp_path, monkeypatch):
    here = min(os.sched_getaffinity(0))
    found = []

    class Noting(Cudart):
        def cudaHostRegister(self, address, num_bytes, flags):
            found.append(os.sched_getaffinity(0))
            return super().cudaHostRegister(address, num_bytes, flags)

    about = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr("torch.cuda.cudart", Noting)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: about)
    root = machine(tmp_path, "1", str(here))
    monkeypatch.setattr(frames, "cpus_beside", lambda pci: numa.cpus_beside(pci, root))
    assert PCI == pci_address("cuda:0")
    before = os.sched_getaffinity(0)
    FrameArena(chain_layout(4), 3, "cuda")
    assert ([{here}], before) == (found, os.sched_getaffinity(0))
