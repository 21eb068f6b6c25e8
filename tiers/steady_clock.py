"""Unix seconds from a monotonic clock. Nothing ends early or late if the wall clock is set.

Any thread.
"""

import time
from collections.abc import Callable


def _since_boot_s() -> float:
    """Seconds of a monotonic timer, which includes sleep if the system can tell."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SteadyClock:
    """The wall time when this object was made, plus the time passed since."""

    def __init__(
        self,
        wall_clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = _since_boot_s,
    ) -> None:
        self._timer = timer
        self._offset_s = wall_clock() - timer()

    def __call__(self) -> float:
        return self._offset_s + self._timer()
