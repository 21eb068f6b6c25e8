"""Unix seconds on a monotonic clock: when the wall clock is set, nothing ends early or late.

Any thread.
"""

import time
from collections.abc import Callable


def _since_boot_s() -> float:
    """A timer that counts sleep where the system can tell."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SteadyClock:
    """The wall clock as it was when this was made, and what has passed since."""

    def __init__(
        self,
        wall_clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = _since_boot_s,
    ) -> None:
        self._timer = timer
        self._offset_s = wall_clock() - timer()

    def __call__(self) -> float:
        return self._offset_s + self._timer()
