"""Idle limits of the memory tiers: blocks that nobody used for so long leave for the tier below.

A block is idle in a tier since it came there, or since the last request that used it ended. One
that the disk is still to have is written first. Engine thread only; seconds of a monotonic clock.
"""

from collections.abc import Callable

from tiers.memory.index import Block
from tiers.memory.residency import Residency
from tiers.policy.retention import IdleClock
from tiers.telemetry.lifetimes import Cause

AT_ONCE = 64  # blocks that leave a tier in one step


class IdleLimits:
    """The two clocks; None where a tier has no limit."""

    def __init__(
        self,
        residency: Residency,
        *,
        device_s: float | None,
        host_s: float | None,
        write: Callable[[Block], bool],
        clock: Callable[[], float],
    ) -> None:
        """`write` hurries a block to the disk; False where the disk is not to have it."""
        self._residency = residency
        self._device: IdleClock[Block] | None = IdleClock(device_s) if device_s else None
        self._host: IdleClock[Block] | None = IdleClock(host_s) if host_s else None
        self._write = write
        self._clock = clock
        self._writing: list[Block] = []
        if device_s or host_s:
            residency.on_rest = self.rested

    def rested(self, block: Block) -> None:
        """A block came to a tier, or nobody uses it any more."""
        now_s = self._clock()
        if self._device is not None and block.slot is not None:
            self._device.use(block, now_s)
        if self._host is not None and block.frame is not None:
            self._host.use(block, now_s)

    def step(self) -> None:
        """Let a step's share of idle blocks go."""
        now_s = self._clock()
        if self._device is not None:
            for block in self._device.expire(now_s, AT_ONCE):
                if block.ranked and block.pins == 0 and not block.kept:
                    self._residency.evict_device(block, Cause.AGE)
        if self._host is not None:
            expired = self._host.expire(now_s, AT_ONCE)
            self._writing = [b for b in [*self._writing, *expired] if not self._leave_host(b)]

    def _leave_host(self, block: Block) -> bool:
        """Let an idle block's frame go; False where it waits for the disk."""
        assert self._host is not None
        if block.frame is None or block in self._host or block.kept:
            return True
        if block.slot is None and block.pins:
            return True  # it rests again when its requests end
        if block.busy or (block.slot is None and not block.on_disk and self._write(block)):
            return False
        self._residency.evict_host(block, Cause.AGE)
        return True
