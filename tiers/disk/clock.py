"""The idle time of blocks on disk, even if the wall clock was set between two runs.

Blocks carry wall-clock times, because they outlive the process. Blocks found at a start are judged
by the newest time among them. So neither the time without a server nor a change of the clock
meanwhile counts.
"""

from typing import NamedTuple


class IdleClock(NamedTuple):
    """The state of a shard when it was opened."""

    end: int = 0  # sequences below this existed
    newest_s: int = 0  # the latest use of any of them
    opened_s: int = 0

    def now_s(self, sequence: int, now_s: int) -> int:
        """The time against which to measure a block's idle time."""
        if sequence >= self.end:
            return now_s
        return self.newest_s + now_s - self.opened_s
