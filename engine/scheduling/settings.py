"""The bounds of a step, and of promotion for waiting requests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Bounds of one step. Token budgets are rounded down to whole blocks, at least one."""

    max_running: int = 64
    step_tokens: int = 512  # prompt tokens computed per step
    # The same while others decode, so that they do not stall. It is raised while more sequences
    # wait for their first token than decode.
    mixed_step_tokens: int = 128
    # Waiting requests whose prefix may be promoted at once. Requests that wait for a block that
    # another request is computing do not count, since they pin the same blocks as that one.
    max_tickets: int = 8
    # Arithmetics of blocks that a disk may hold from before: told apart, never served.
    other_arithmetics: tuple[bytes, ...] = ()
    max_passed_s: float = 5.0  # the longest time a request is passed by for better cached ones
