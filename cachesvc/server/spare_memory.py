"""Returns memory to the system that malloc keeps after it was freed. Called off the event loop.

glibc gives threads arenas of their own, up to eight a core. What is freed in one between blocks in
use stays resident for the next use, so a server grows with the most that its threads ever used at
once (docs/measurements, "Memory"). Free memory at the end of a thread's arena stays: up to 64 MiB.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

GROWTH_BYTES = 64 << 20  # less is kept: memory that was returned is slow to touch again


class SpareMemory:
    """Invariant: after a call the process has grown by less than `growth_bytes` since the last
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
