"""Opening a disk tier: lock, format, recovery after a crash, and the size of the maps.

The folder's contents are kept if possible. Another format version is cleared and counted as faults.
Each shard is checked before LMDB opens it (`tiers.disk.recovery`), because of power cuts, bit
errors and truncated files.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tiers.blocks.layout import BlockLayout
from tiers.disk.counts import DiskCounts
from tiers.disk.directory import (
    FORMAT,
    DirectoryLock,
    Meta,
    make_root,
    read_meta,
    remove_shards,
    shard_path,
    write_meta,
)
from tiers.disk.events import DiskEvents
from tiers.disk.format.codec import bound
from tiers.disk.guard import DiskGuard
from tiers.disk.pin_file import keys_in_force, set_damaged_aside
from tiers.disk.recovery.check import CHECK_AT_ONCE_S
from tiers.disk.room import OVERHEAD_BYTES, DiskRoom
from tiers.disk.settings import DiskSettings
from tiers.disk.shard import Shard
from tiers.disk.slot import Opening, ShardSlot
from tiers.disk.storage import NoMemory, Storage, StorageError
from tiers.disk.tier import DiskTier
from tiers.disk.transaction import BATCHES_IN_FILE, reserve_pages
from tiers.errors import ConfigurationError, MissReason, mib
from tiers.policy.quota import Quotas, QuotaShares
from tiers.steady_clock import SteadyClock
from tiers.telemetry.events import EventStream

logger = logging.getLogger(__name__)

MIN_BLOCKS = 4
RECORDS = 0.9  # of the pages in use; the rest is the index, about 500 bytes a block
_PAGE = 4096


def open_disk(
    root: Path,
    layout: BlockLayout,
    capacity_bytes: int,
    *,
    num_shards: int = 1,
    settings: DiskSettings | None = None,
    storage: Storage | None = None,
    shares: QuotaShares | None = None,
    clock: Callable[[], float] | None = None,
    stream: EventStream | None = None,
    check_s: float = CHECK_AT_ONCE_S,
) -> DiskTier:
    """Opens or creates the disk tier in `root`. Its files never take more than `capacity_bytes`,
    and less on a small or full file system (`tiers.disk.room`).

    `num_shards` applies to a new folder; an existing one keeps its number, if the capacity allows.
    With `shares`, no group within its share of the disk loses a block to another. A shard that
    cannot be checked within `check_s` is readable at once, and writable once a child process has
    checked it. Raises DirectoryLocked if another server holds the folder, and ConfigurationError
    for an invalid folder or size.
    """
    storage = storage or Storage()
    clock = clock or SteadyClock()
    settings = settings or DiskSettings()
    events = DiskEvents(stream or EventStream(), clock)
    make_root(root)
    with _locked(root) as lock:
        faults: Counter[MissReason] = Counter()
        meta = _standing(root, faults)
        set_damaged_aside(root)
        num_shards = meta.num_shards if meta else num_shards
        if num_shards > 1 and not _fits(capacity_bytes, num_shards, layout.nbytes):
            if meta:
                _drop_shards(root, meta, capacity_bytes)
            meta, num_shards = None, 1
        num_blocks = meta.num_blocks if meta else 0
        if meta and num_blocks and meta.block_size != layout.block_size:
            _tell_other_size(root, meta, layout.block_size)
        map_bytes = shard_map_bytes(capacity_bytes, num_shards, layout.nbytes)
        at_once = min(settings.batch_bytes, map_bytes // BATCHES_IN_FILE)
        guard = _guard(shares, num_shards, map_bytes, max(at_once, bound(layout.nbytes)))
        guard.keep(frozenset(keys_in_force(root, clock())))
        counts = DiskCounts(num_shards, faults)
        map_bytes = max(map_bytes, meta.map_bytes if meta else 0)
        lost = partial(counts.fault, MissReason.TORN)
        slots: list[ShardSlot] = []
        for number in range(num_shards):
            path = shard_path(root, number)
            shard = partial(_open_shard, path, map_bytes, storage, clock, guard, events)
            opening = Opening(storage, map_bytes, shard, lost, check_s)
            slots.append(ShardSlot(path, opening, num_blocks // num_shards))
        room = DiskRoom(root, slots, counts, capacity_bytes, settings.reserve_bytes, storage)
        room.fit()
        opened = Meta(
            FORMAT,
            num_shards,
            map_bytes,
            num_blocks=num_blocks,
            block_size=layout.block_size,
            capacity_bytes=capacity_bytes,
            reserve_bytes=settings.reserve_bytes,
        )
        write_meta(root, opened)
        return DiskTier(
            root,
            layout,
            slots,
            lock,
            replace(settings, batch_bytes=at_once),
            room=room,
            guard=guard,
            clock=clock,
            counts=counts,
            events=events,
        )


@contextmanager
def _locked(root: Path) -> Iterator[DirectoryLock]:
    """The folder's lock, released on failure. Raises ConfigurationError for LMDB's errors."""
    lock = DirectoryLock(root)
    try:
        yield lock
    except BaseException as error:
        lock.release()
        if isinstance(error, StorageError) and not isinstance(error, OSError):  # of LMDB
            advice = f"mend that, or move {root} away: what it holds is computed again"
            if isinstance(error, NoMemory):  # for a map as large as its capacity
                advice = "lower --disk-cache"
            raise ConfigurationError(
                f"the disk cache cannot be opened: {error}; {advice}"
            ) from error
        raise


def _open_shard(
    path: Path,
    map_bytes: int,
    storage: Storage,
    clock: Callable[[], float],
    guard: DiskGuard,
    events: DiskEvents,
) -> Shard:
    path.mkdir(parents=True, exist_ok=True)
    shard = Shard(
        path, map_bytes, storage=storage, clock=clock, guard=guard, on_commit=events.committed
    )
    events.opened(shard.totals.num_blocks)
    return shard


def shard_map_bytes(capacity_bytes: int, num_shards: int, block_bytes: int) -> int:
    """The map size of each shard that keeps all files within the capacity."""
    map_bytes = (capacity_bytes // num_shards - OVERHEAD_BYTES) // _PAGE * _PAGE
    block_pages = bound(block_bytes) // _PAGE + 2
    map_pages = max(0, map_bytes // _PAGE)
    least = reserve_pages(map_pages, block_pages) + MIN_BLOCKS * block_pages
    if map_pages < least:
        need = num_shards * (OVERHEAD_BYTES + 2 * least * _PAGE)
        raise ConfigurationError(
            f"a disk cache of {mib(capacity_bytes)} is too small for blocks of "
            f"{mib(block_bytes)} in {num_shards} shard(s); give it {-(-need >> 20)}MiB or more, "
            f"or turn it off with 0"
        )
    return map_bytes


def _fits(capacity_bytes: int, num_shards: int, block_bytes: int) -> bool:
    try:
        return bool(shard_map_bytes(capacity_bytes, num_shards, block_bytes))
    except ConfigurationError:
        return False


def _drop_shards(root: Path, meta: Meta, capacity_bytes: int) -> None:
    logger.warning(
        f"disk cache: {root} has {meta.num_shards} shards, too many for {mib(capacity_bytes)}: it "
        f"starts with an empty one, and {meta.num_blocks} blocks are dropped"
    )
    remove_shards(root)


def _guard(
    shares: QuotaShares | None, num_shards: int, map_bytes: int, batch_bytes: int
) -> DiskGuard:
    """The guard for quotas, which are shares of the space in use when eviction begins."""
    if shares is None:
        return DiskGuard()
    pages, batch = map_bytes // _PAGE, -(-batch_bytes // _PAGE)
    usable = pages - reserve_pages(pages, batch) - batch
    return DiskGuard(Quotas(shares, int(num_shards * usable * _PAGE * RECORDS)))


def _standing(root: Path, faults: Counter[MissReason]) -> Meta | None:
    """The folder's contents in this format. Anything else is cleared and counted."""
    meta = read_meta(root)
    if meta is not None and meta.format == FORMAT:
        return meta
    if any(root.glob("shard-*")):
        num_lost = max(1, meta.num_blocks if meta else 0)
        faults[MissReason.VERSION] += num_lost
        logger.warning(
            f"disk cache: {root} is of format {meta.format if meta else 'unknown'}, not {FORMAT}; "
            f"{num_lost} block(s) dropped"
        )
        remove_shards(root)
    return None


def _tell_other_size(root: Path, meta: Meta, block_size: int) -> None:
    """Says what becomes of the folder's blocks, which have another size."""
    logger.warning(
        f"disk cache: {root} was last served in blocks of {meta.block_size} tokens, now of "
        f"{block_size}: blocks of another size are not found, and leave as the oldest when room is "
        f"needed; cache.block_size = {meta.block_size} finds them again"
    )
