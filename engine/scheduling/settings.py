"""The bounds of a step, and of what is brought up for those that wait."""

from dataclasses import dataclass
from enum import StrEnum


class QueueOrder(StrEnum):
    """How waiting requests are ordered."""

    ARRIVAL = "arrival"
    CACHED_FIRST = "cached_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Bounds of one step. Token budgets are rounded down to whole blocks, one at least."""

    max_running: int = 64
    step_tokens: int = 512  # prompt tokens computed in a step
    mixed_step_tokens: int = 128  # the same while others decode, so that they do not stall; more
    # where more wait for their first token than decode
    max_tickets: int = 8  # waiting requests whose prefix may be brought up at once; those that wait
    # for a block that another request computes pin what that one does, and do not count
    order: QueueOrder = QueueOrder.CACHED_FIRST
    max_passed_s: float = 5.0  # the longest that a request is passed by for better cached ones
