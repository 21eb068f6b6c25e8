"""Settings of OpenMP, whose threads compute on a CPU. libgomp reads them once, when torch loads it.

`engine` applies them as it is imported, before it imports torch. In a program that imported torch
first, waiting threads spin for longer when other processes interrupt them; the number of threads
follows the quota all the same (`engine.execution.team`). No torch here.
"""

import ctypes
import math
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from engine import cgroups

# How often a waiting thread looks before it sleeps, while there are no more threads than
# processors: about 1 ms on Intel, where a look takes 140 cycles, and half of it on AMD. libgomp's
# own 300,000 outlast the turn that a system gives a process (docs/measurements, "Threads").
SPINS = "20000"
TURN_NS = 1_000_000  # the system's own are 1.4 ms on two processors
T = TypeVar("T")


def configure(environ: MutableMapping[str, str]) -> None:
    """Set what the user has not set."""
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if (usable := num_processors()) < len(allowed_processors()):
        environ.setdefault("OMP_NUM_THREADS", str(usable))


def num_processors() -> int:
    """How many processors this process may use, by its affinity and its cgroups' quotas. Part of a
    processor counts as one."""
    found = quotas(cgroups.OWN, cgroups.ROOT)
    return max(1, min([len(allowed_processors()), *(math.ceil(quota) for quota in found)]))


def take_short_turns() -> None:
    """Ask for short turns of this thread and those it starts: beside others they come sooner."""
    number = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
    with suppress(OSError):  # it is nothing that a start should fail by
        if number and sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            asked = struct.pack("IIQiIQQQII", 56, os.SCHED_OTHER, 0, nice, 0, TURN_NS, 0, 0, 0, 0)
            ctypes.CDLL(None).syscall(number, 0, asked, 0)  # sched_setattr, heeded from 6.12 on


def allowed_processors() -> set[int]:
    """The numbers of the processors that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def quotas(own: Path, root: Path) -> Iterator[float]:
    """The quotas in processors of this process's cgroups and of those above them. The arguments are
    those of `engine.cgroups.folders`."""
    for folder in cgroups.folders("cpu", own, root):
        if (quota := _quota(folder)) is not None:
            yield quota


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError):
        return None


def run_apart(work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own. The thread and its team of arithmetic threads end with the
    work.

    If several threads have a team each, libgomp counts more threads than processors. Then each
    region of each team ends in sleep instead of spinning (docs/measurements, "Threads"). So only
    the engine thread keeps a team.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="cachesvc-load") as thread:
        return thread.submit(work).result()
