"""Events of blocks in memory: always counted, and published if somebody subscribes.

Fed by the residency, the promoter and the demoter. Engine thread only.
"""

import time
from array import array
from collections import Counter
from collections.abc import Sequence

from tiers.errors import MissReason
from tiers.memory.block import NEVER_USED, Block
from tiers.telemetry.events import CacheEvent, EventKind, EventStream
from tiers.telemetry.lifetimes import Lives
from tiers.telemetry.transfers import TransferCounts
from tiers.tier import Cause, TierName, TierStats


class MemoryCounters:
    """Counters by tier and event, lifetimes by tier, transfers by lane, and the event stream."""

    def __init__(
        self, block_bytes: int, stream: EventStream, *, num_slots: int, num_frames: int
    ) -> None:
        self.stream = stream
        self.events: Counter[tuple[TierName, CacheEvent]] = Counter()
        self.faults: Counter[tuple[TierName, MissReason]] = Counter()
        self.lives = {TierName.DEVICE: Lives(), TierName.HOST: Lives()}
        self.transfers = TransferCounts(block_bytes)
        self._block_bytes = block_bytes
        self._slot_since_s = array("d", bytes(8 * num_slots))  # when its KV came to stand there
        self._frame_since_s = array("d", bytes(8 * num_frames))

    def count(self, tier: TierName, event: CacheEvent, blocks: int = 1) -> None:
        self.events[tier, event] += blocks

    def fault(self, tier: TierName, reason: MissReason) -> int:
        """Counts a block that a memory tier held and could not give. Returns how many so far."""
        self.faults[tier, reason] += 1
        return self.faults[tier, reason]

    def came(self, block: Block, tier: TierName, source: TierName | None = None) -> None:
        """The block's KV is now in a memory tier; `source` is the tier it was copied from."""
        self.count(tier, CacheEvent.STORED)
        if tier is TierName.DEVICE:
            assert block.slot is not None, f"{block} came to no slot"
            self._slot_since_s[block.slot] = time.monotonic()
        else:
            assert block.frame is not None, f"{block} came to no frame"
            self._frame_since_s[block.frame.number] = time.monotonic()
        if self.stream.listening and block.key is not None:
            kind = EventKind.STORED if source is None else EventKind.MOVED
            self._tell(kind, block, tier, source=source)

    def took_slot(self, slot: int) -> None:
        """A slot begins to fill. A partly filled block may leave it before `came` is called."""
        self._slot_since_s[slot] = time.monotonic()

    def moved_slot(self, slot: int, to: int) -> None:
        self._slot_since_s[to] = self._slot_since_s[slot]

    def moved_frame(self, number: int, to: int) -> None:
        self._frame_since_s[to] = self._frame_since_s[number]

    def left(self, block: Block, tier: TierName, cause: Cause) -> None:
        """The block is about to leave a memory tier; its place is still known. A block that has
        left the index was counted then."""
        if block.parent is None:
            return
        purged = cause is Cause.REQUEST
        self.count(tier, CacheEvent.PURGED if purged else CacheEvent.EVICTED)
        now_s = time.monotonic()
        lived_s = now_s - self._since_s(block, tier)
        self.lives[tier].left(cause, lived_s=lived_s, idle_s=now_s - block.use.time_s)
        if self.stream.listening and block.key is not None:
            self._tell(EventKind.REMOVED, block, tier, cause=cause)

    def stats(self, tier: TierName, num_blocks: int, capacity: int, used: int) -> TierStats:
        """The stats of a memory tier with `num_blocks` in `used` of `capacity` places."""
        lives, nbytes = self.lives[tier].stats(), num_blocks * self._block_bytes
        return TierStats(
            name=tier,
            num_blocks=num_blocks,
            used_bytes=used * self._block_bytes,
            logical_bytes=nbytes,
            capacity_bytes=capacity * self._block_bytes,
            stored=self.events[tier, CacheEvent.STORED],
            evicted=self.events[tier, CacheEvent.EVICTED],
            hits=lives.reuse_gap.count,
            faults={reason: count for (of, reason), count in self.faults.items() if of is tier},
            lives=lives,
        )

    def _since_s(self, block: Block, tier: TierName) -> float:
        if tier is TierName.DEVICE:
            assert block.slot is not None, f"{block} stands in no slot"
            return self._slot_since_s[block.slot]
        assert block.frame is not None, f"{block} stands in no frame"
        return self._frame_since_s[block.frame.number]

    def reused(self, blocks: Sequence[Block]) -> None:
        """Records hits on the blocks of one prefix. Call before they are pinned.

        Along a prefix the last use only gets older. So if both ends of a run have the same last
        use, all of it has, and usually only the ends are read.
        """
        first, last = blocks[0], blocks[-1]
        on_device = first.slot is not None
        if first.use is last.use and on_device is (last.slot is not None):
            used = first.use is not NEVER_USED
            gap_s = time.monotonic() - first.use.time_s if used else 0.0
            tier = TierName.DEVICE if on_device else TierName.HOST
            self.lives[tier].reused(gap_s, len(blocks))
        else:
            middle = len(blocks) // 2
            self.reused(blocks[:middle])
            self.reused(blocks[middle:])

    def _tell(
        self,
        kind: EventKind,
        block: Block,
        tier: TierName,
        *,
        source: TierName | None = None,
        cause: Cause | None = None,
    ) -> None:
        self.stream.publish(
            kind,
            tier,
            key=block.key,
            parent=block.parent,
            scope=block.scope,
            tokens=block.tokens,
            nbytes=self._block_bytes,
            source=source,
            cause=cause,
        )
