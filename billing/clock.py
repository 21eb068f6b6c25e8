"""Detects jumps of the wall clock. Entries are dated by it, so a jump would move bills to other
months.

The wall clock is compared with a timer that keeps running during sleep and is never set.
Thread-safe: values are replaced, never changed.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from billing.errors import ClockJumped

NS = 10**9
TOLERANCE_NS = 120 * NS


def boot_timer_ns() -> int:
    """Nanoseconds since the machine started, including sleep if the system counts it."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock)


def said_behind(newest_ns: int, now_ns: int) -> str:
    """That the ledger knows of a later moment than this host's, in words; empty where not."""
    if newest_ns - now_ns <= TOLERANCE_NS:
        return ""
    newest = datetime.fromtimestamp(newest_ns // NS, UTC)
    return (
        f"the ledger has entries of {newest:%Y-%m-%d %H:%M:%SZ}, and the clock of this host is "
        f"{(newest_ns - now_ns) // NS:,} s behind that: it is wrong now, or one was ahead then; "
        "set it right before charges get the wrong day"
    )


class ClockWatch:
    """Tracks how far the wall clock is off since this object was created.

    `others_ahead_ns` comes from the clock of a database on another host, set by `compare`.
    """

    def __init__(self, clock_ns: Callable[[], int], timer_ns: Callable[[], int] | None) -> None:
        self._clock_ns = clock_ns
        self._timer_ns = timer_ns or clock_ns
        self._began_ns = clock_ns() - self._timer_ns()
        self._ahead_of_database_ns = 0

    def compare(self, database_ns: int | None) -> None:
        """Records how far this host's clock is ahead of the database's."""
        if database_ns is not None:
            self._ahead_of_database_ns = self._clock_ns() - database_ns

    @property
    def skew_ns(self) -> int:
        """How far the clock is off its own course or the database's. Positive if it is ahead."""
        jumped = self._clock_ns() - self._timer_ns() - self._began_ns
        return max(jumped, self._ahead_of_database_ns, key=abs)

    @property
    def jumped(self) -> ClockJumped | None:
        """The error of what would be dated by the clock now; None if the date would be right."""
        skew_ns = self.skew_ns
        if abs(skew_ns) <= TOLERANCE_NS:
            return None
        where = "ahead of" if skew_ns > 0 else "behind"
        return ClockJumped(
            f"the clock of this host is {abs(skew_ns) // NS:,} s {where} where it should be, and "
            "bills would be of another day; set it right, or restart the server if it is right now"
        )
