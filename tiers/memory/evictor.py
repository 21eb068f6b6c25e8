"""How a block leaves the device, the host, or memory. Engine thread only."""

from collections.abc import Callable

from tiers.blocks.frames import Frame
from tiers.memory.block import Block
from tiers.memory.counters import MemoryCounters
from tiers.memory.device_tier import DeviceTier
from tiers.memory.host_tier import HostTier
from tiers.memory.index import BlockIndex
from tiers.telemetry.events import CacheEvent
from tiers.telemetry.misses import EvictedKeys
from tiers.tier import Cause, TierName


class Evictor:
    """Takes blocks off their tiers. The policy of the tier has forgotten the block before. A block
    whose last copy in memory has left is removed from the index."""

    def __init__(
        self, index: BlockIndex, device: DeviceTier, host: HostTier, counters: MemoryCounters
    ) -> None:
        self._index = index
        self._device = device
        self._host = host
        self._counters = counters
        self.evicted_keys = EvictedKeys()
        self.num_slots_taken = self.num_frames_taken = 0  # count up, from blocks that had to leave
        # What the demoter sets: copies a block to a frame, if it gets one; says that the write
        # policy keeps a block from the disk; is told of a block that no tier has any more.
        self.demote: Callable[..., bool] = lambda block, **_: False
        self.skips: Callable[[Block], bool] = lambda block: False
        self.on_lost: Callable[[Block], None] = lambda block: None
        self.on_left_host: Callable[[Block], None] | None = None  # told of clean ones that left

    def off_device(self, block: Block, cause: Cause) -> int:
        """Demote a block if there is room below. Returns its slot, for a new owner."""
        if block.key is not None and block.frame is None:
            self.demote(block)
        self._counters.left(block, TierName.DEVICE, cause)
        slot = self._device.leave(block)
        self.num_slots_taken += 1
        if block.frame is not None:
            self._host.left_device(block)
        else:
            self._left_memory(block, TierName.DEVICE, cause)
        return slot

    def off_host(self, block: Block, cause: Cause) -> Frame:
        """Returns the block's frame, for a new owner."""
        self._counters.left(block, TierName.HOST, cause)
        frame = self._host.leave(block)
        self.num_frames_taken += 1
        if block.slot is None:
            if block.held_below and self.on_left_host is not None:
                self.on_left_host(block)
            self._left_memory(block, TierName.HOST, cause)
        return frame

    def _left_memory(self, block: Block, tier: TierName, cause: Cause) -> None:
        """The block's last copy in memory was in `tier`."""
        if block.key is not None and not block.held_below:
            skipped = self.skips(block) and not block.pinned
            self._counters.count(tier, CacheEvent.SKIPPED if skipped else CacheEvent.LOST)
            if not skipped:
                self.on_lost(block)
            self.evicted_keys.note(block.key, tier, cause)
        self._index.forget(block)
