"""How a disk tier behaves. Its folder and size are arguments of `open_disk`."""

from dataclasses import dataclass
from enum import StrEnum

BATCH_BYTES = 8 << 20


class DiskOrder(StrEnum):
    """Which block leaves first. The order is on disk, so it survives a restart."""

    LRU = "lru"  # the one unused the longest; a hit moves a block, together with the next write
    FIFO = "fifo"  # the one written first; a hit costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    order: DiskOrder = DiskOrder.LRU
    moves: bool = False  # what is read leaves first, until the tiers above give it up again
    idle_ttl_s: int | None = None  # forget blocks unused for this long
    write_budget_bytes: int | None = None  # a day (UTC); past it, blocks are not written
    batch_bytes: int = BATCH_BYTES  # logical bytes in one transaction, at most; a block at least
