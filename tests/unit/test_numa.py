"""Memory beside its GPU, on machines that are made of files."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.chain_runner import chain_layout
from tests.unit.test_frames_pinned import Cudart
from tiers.blocks import frames, numa
from tiers.blocks.frames import FrameArena, pci_address
from tiers.blocks.numa import cpus_beside, running_on

PCI = "0000:3b:00.0"


def machine(root: Path, node: str, cpulist: str) -> Path:
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
    found: list[set[int]] = []
    with running_on(one):
        assert one == os.sched_getaffinity(0)
        beside = threading.Thread(target=lambda: found.append(os.sched_getaffinity(main)))
        beside.start()
        beside.join()
    with pytest.raises(RuntimeError), running_on(one):
        raise RuntimeError
    assert before == os.sched_getaffinity(0)
    with running_on(frozenset({max(before) + 4096})):
        assert before == os.sched_getaffinity(0), "none of them is ours"
    assert [one] == found, "of the thread that asked"


def test_a_container_that_forbids_it_changes_nothing(monkeypatch):
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    before = os.sched_getaffinity(0)
    with running_on(frozenset({min(before)})):
        assert before == os.sched_getaffinity(0)


def test_an_arena_is_pinned_by_a_thread_beside_the_gpu(tmp_path, monkeypatch):
    here = min(os.sched_getaffinity(0))
    found: list[set[int]] = []

    class Noting(Cudart):
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
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
