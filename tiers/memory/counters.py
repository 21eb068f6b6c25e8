"""What happened to blocks in memory: counted always, told where somebody listens.

Fed by the residency, the promoter and the demoter, on the engine thread alone.
"""

import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from tiers.memory.index import NEVER_USED, Block
from tiers.telemetry.events import EventKind, EventStream
from tiers.telemetry.lifetimes import Lives
from tiers.telemetry.transfers import Transfers
from tiers.tier import Cause, TierName


class CacheEvent(StrEnum):
    """What can happen to a block in a tier; the label of `cachesvc_cache_events_total`."""

    STORED = "stored"  # its KV came to stand in the tier
    PROMOTED = "promoted"  # copied up out of the tier
    DEMOTED = "demoted"  # copied down out of the tier
    EVICTED = "evicted"  # left the tier for room
    LOST = "lost"  # evicted while no lower tier held it
    SKIPPED = "skipped"  # not copied down: the write policy says it is not worth it
    PURGED = "purged"  # removed on request


class Chronicle:
    """Counters by tier and event, lives by tier, transfers by lane, and the stream of events."""

    def __init__(self, block_bytes: int, stream: EventStream) -> None:
        self.stream = stream
        self.events: Counter[tuple[TierName, CacheEvent]] = Counter()
        self.lives = {TierName.DEVICE: Lives(), TierName.HOST: Lives()}
        self.transfers = Transfers(block_bytes)
        self._block_bytes = block_bytes

    def count(self, tier: TierName, event: CacheEvent, blocks: int = 1) -> None:
        self.events[tier, event] += blocks

    def came(self, block: Block, tier: TierName, source: TierName | None = None) -> None:
        """The block's KV stands in a memory tier now; `source` is the tier it was copied from."""
        self.count(tier, CacheEvent.STORED)
        now_s = time.monotonic()
        if tier is TierName.DEVICE:
            block.device_since_s = now_s
        else:
            block.host_since_s = now_s
        if self.stream.listening and block.key is not None:
            kind = EventKind.STORED if source is None else EventKind.MOVED
            self._tell(kind, block, tier, source=source)

    def left(self, block: Block, tier: TierName, cause: Cause) -> None:
        """The block, its key still known, stands in a memory tier no more."""
        purged = cause is Cause.REQUEST
        self.count(tier, CacheEvent.PURGED if purged else CacheEvent.EVICTED)
        now_s = time.monotonic()
        since_s = block.device_since_s if tier is TierName.DEVICE else block.host_since_s
        self.lives[tier].left(cause, lived_s=now_s - since_s, idle_s=now_s - block.use.time_s)
        if self.stream.listening and block.key is not None:
            self._tell(EventKind.REMOVED, block, tier, cause=cause)

    def reused(self, blocks: Sequence[Block]) -> None:
        """Blocks of one prefix are hit; to be told before they are pinned.

        Along a prefix the last use only gets older, so a run with one use at both ends has it
        throughout: a look at the ends, mostly, instead of one at each block.
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
