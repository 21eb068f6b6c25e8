"""The processors beside a GPU. Memory that their threads touch first lies on the GPU's side of the
machine, where its copies do not cross the link between sockets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SYS = Path("/sys")


def cpus_beside(pci_address: str, sys: Path = SYS) -> frozenset[int]:
    """The processors beside a PCI device, such as `0000:3b:00.0`. Empty if none are named."""
    try:
        node = int((sys / "bus/pci/devices" / pci_address / "numa_node").read_text())
        listed = (sys / f"devices/system/node/node{node}/cpulist").read_text()
        return _parsed(listed)
    except (OSError, ValueError):  # without several nodes it says -1, and there is no such node
        return frozenset()


@contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """Keeps this thread on those of `cpus`, if any, that the process may use."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # a container may forbid it
        if cpus & before:
            os.sched_setaffinity(0, cpus & before)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def _parsed(listed: str) -> frozenset[int]:
    """The numbers in a list such as `0-3,8,10-11`. Raises ValueError."""
    numbers: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
