"""How a disk tier behaves. Its folder and size are arguments of `open_disk`."""

from dataclasses import dataclass

BATCH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """The block unused the longest leaves first; the order is on disk and survives a restart."""

    moves: bool = False  # what is read leaves first, until the tiers above give it up again
    idle_ttl_s: int | None = None  # forget blocks unused for this long
    write_budget_bytes: int | None = None  # a day (UTC); past it, blocks are not written
    batch_bytes: int = BATCH_BYTES  # logical bytes in one transaction, at most; a block at least
