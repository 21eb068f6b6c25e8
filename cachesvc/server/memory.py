"""The memory of this process: what it may have, what its caches take when full, and what malloc
keeps.

The system kills a process that exceeds the limit of its control groups, or what the machine has.
Caches take memory as they fill, so that may happen long after the start.

glibc gives threads arenas of their own, up to eight a core. What is freed in one between blocks in
use stays resident for the next use, so a server grows with the most that its threads ever used at
once (docs/measurements, "Memory"). Free memory at the end of a thread's arena stays: up to 64 MiB.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from api.format import size
from cachesvc.config.sections import CacheSection
from engine.cgroups import memory_limit

logger = logging.getLogger(__name__)

COPIES = "working copies"  # kept for later prompts; no option sets them
GROWTH_BYTES = 64 << 20  # less is kept: memory that was returned is slow to touch again


def full_caches(
    cache: CacheSection, *, on_gpu: bool, node_bytes: int | None = None
) -> dict[str, int]:
    """Bytes of ordinary memory that caches take when full, by the option that sets each.

    With vLLM, `node_bytes` are its node's: a control group pays for what its engine writes there,
    which may be all.
    """
    from engine.hardware import CPU_CACHE_BYTES, CPU_COPIES_BYTES  # torch

    host_bytes = cache.host_bytes if node_bytes is None else node_bytes
    if on_gpu:
        return {"--host-cache": host_bytes}
    device_bytes = cache.device_bytes or CPU_CACHE_BYTES
    copies = {COPIES: CPU_COPIES_BYTES // 4} if node_bytes is None else {}
    return {"--device-cache": device_bytes, "--host-cache": host_bytes, **copies}


def largest(caches: Mapping[str, int]) -> str:
    """The option of the cache that takes most, and its size."""
    option = max((name for name in caches if name != COPIES), key=caches.__getitem__)
    return f"{option} ({size(caches[option])})"


def warn_of_limit(caches: Mapping[str, int]) -> None:
    """Say if they will not fit beside what this process has now: its code and weights."""
    limit, total = memory_limit(), total_bytes()
    needed = anonymous_bytes() + sum(caches.values())
    lowest = min((each for each in (limit, total) if each is not None), default=needed)
    if needed > lowest:
        whose = "limit of this process's control group" if lowest == limit else "of this machine"
        logger.warning(
            f"the memory {whose} is {size(lowest)}, and with full caches the process needs "
            f"{size(needed)}: lower {largest(caches)}, or the system may end it"
        )


class SpareMemory:
    """Returns memory to the system that malloc keeps after it was freed. Off the event loop.

    Invariant: after a call the process has grown by less than `growth_bytes` since the last
    return, or malloc has nothing left to return. Without glibc nothing happens."""

    def __init__(
        self,
        growth_bytes: int = GROWTH_BYTES,
        *,
        resident: Callable[[], int] | None = None,
        trim: Callable[[int], int] | None = None,
    ) -> None:
        self._growth_bytes = growth_bytes
        self._resident = resident or anonymous_bytes
        self._trim = trim or getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._least: int | None = None

    def give_back(self) -> None:
        """Return it, if the process has grown that much. 100 ms for 240 MiB on a busy machine."""
        resident = self._resident()
        if self._least is None or resident < self._least:
            self._least = resident
        if resident - self._least >= self._growth_bytes and self._trim is not None:
            self._trim(0)
            self._least = self._resident()


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's; 0 where /proc does not tell."""
    return _told("/proc/self/status", "RssAnon:") or 0


def total_bytes() -> int | None:
    """What the machine has; None where /proc does not tell."""
    return _told("/proc/meminfo", "MemTotal:")


def _told(file: str, name: str) -> int | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(name)]
    return int(found[0]) << 10 if found else None
