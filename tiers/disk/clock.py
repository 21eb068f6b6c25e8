"""How long a block on disk has been idle, even if the wall clock was set between two runs.

Blocks carry wall-clock times, since they outlive the process. What a server finds at its start is
judged by the newest time among it, so that the time in which no server ran counts for none of it,
nor does a clock that was set meanwhile.
"""

from typing import NamedTuple


class IdleClock(NamedTuple):
    """What stood in a shard when it was opened."""

    end: int = 0  # sequences below this one were there
    newest_s: int = 0  # the last use of any of them
    opened_s: int = 0

    def now_s(self, sequence: int, now_s: int) -> int:
        """The time by which to judge how long a block has been idle."""
        if sequence >= self.end:
            return now_s
        return self.newest_s + now_s - self.opened_s
