"""A disk tier's behaviour. Its folder and size are arguments of `open_disk`."""

from dataclasses import dataclass

BATCH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """The least recently used block leaves first. The order is stored on disk."""

    compresses: bool = True  # new records, where that saves a tenth
    computes_elsewhere: bool = False  # than on the processors, so more threads may read
    moves: bool = False  # a promoted block leaves first, until the tiers above drop it again
    idle_ttl_s: int | None = None  # delete blocks unused for this long
    reserve_bytes: int | None = None  # of its file system, left to others; see `room.reserve_of`
    batch_bytes: int = BATCH_BYTES  # logical bytes in one transaction, at most; a block at least
