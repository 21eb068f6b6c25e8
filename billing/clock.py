"""Tells when the wall clock jumps. Entries are dated by it, and a jump moves bills to other months.

The wall clock is compared with a timer of the machine that runs on through sleep and is never set.
Thread-safe: values are replaced, never changed.
"""

import time
from collections.abc import Callable

from billing.errors import ClockJumped

NS = 10**9
TOLERANCE_NS = 120 * NS


def boot_timer_ns() -> int:
    """Nanoseconds since the machine started, sleep included where the system counts it."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock)


class ClockWatch:
    """How far the wall clock is from where it should be since this was made.

    `others_ahead_ns` is what a database on another host says of its own clock; told by `compare`.
    """

    def __init__(self, clock_ns: Callable[[], int], timer_ns: Callable[[], int] | None) -> None:
        self._clock_ns = clock_ns
        self._timer_ns = timer_ns or clock_ns
        self._began_ns = clock_ns() - self._timer_ns()
        self._ahead_of_database_ns = 0

    def compare(self, database_ns: int | None) -> None:
        """Note how far this host's clock is ahead of the database's."""
        if database_ns is not None:
            self._ahead_of_database_ns = self._clock_ns() - database_ns

    @property
    def skew_ns(self) -> int:
        """Above zero where the clock is ahead: of its own course, or of the database's."""
        jumped = self._clock_ns() - self._timer_ns() - self._began_ns
        return max(jumped, self._ahead_of_database_ns, key=abs)

    def check(self) -> None:
        """Raises `ClockJumped` where what is booked now would have a wrong date."""
        skew_ns = self.skew_ns
        if abs(skew_ns) > TOLERANCE_NS:
            where = "ahead of" if skew_ns > 0 else "behind"
            raise ClockJumped(
                f"the clock of this host is {abs(skew_ns) // NS:,} s {where} where it should be, "
                "and bills would be of another day; set it right, or restart the server if it is "
                "right now"
            )
