"""How much a disk tier's files may take: its capacity, or what leaves a reserve on their disk.

Others fill disks too, and the ledger is usually on the same one. So the writer looks at the file
system before each store, and every few seconds while it is idle:

    free: the reserve or more            the files may grow until the reserve is left
          less, but half of it or more   they stay as they are
          still less, or a write failed  blocks leave until the reserve is free again

Freed pages are given back to the file system where they lie (`Shard.give_back`), which needs no
room. A shard that cannot be written even so is replaced by an empty one.
"""

import errno
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tiers.disk.counts import DiskCounts
from tiers.disk.shard import Shard, ShardBusy, ShardDamaged
from tiers.disk.slot import ShardSlot
from tiers.disk.storage import FileSystem, Storage, StorageError
from tiers.errors import MissReason, mib

logger = logging.getLogger(__name__)

LEAST_BYTES = 1 << 20  # of a shard, whatever is free
OVERHEAD_BYTES = 96 << 10  # lock.mdb of a shard (64 bytes a reader slot), disk.json, folders
BITE_BYTES, BITES = 16 << 20, 16  # given up in one step: at least, and this part of a file
RELIEF_COMMITS = 2  # after which pages that the first of them freed can be given back


def reserve_of(wanted: int | None, total: int) -> int:
    """Bytes of a file system to leave to others: of its own accord 5 %, but 1 to 16 GiB, and a
    quarter of a small one."""
    if wanted is not None:
        return wanted
    return min(total // 4, max(1 << 30, min(total // 20, 16 << 30)))


def allowed(held: int, before: int, found: FileSystem, reserve: int, *, failed: bool) -> int:
    """Bytes that files of `held` bytes may take, where they might take `before` at the last look.
    `failed`: a write found no room, for example because of a quota."""
    short = reserve - found.free
    if failed:
        short = max(short, held // BITES)
    if short <= 0 or failed or short > reserve // 2:
        return max(0, held - short)
    return before


def limit_shards(
    root: Path, setting_bytes: int, reserve_bytes: int | None, shards: Sequence[Shard]
) -> None:
    """The limits of shards that a command opened. Raises OSError."""
    held = sum(shard.file_bytes() + OVERHEAD_BYTES for shard in shards)
    found = Storage().file_system(root)
    may = allowed(held, held, found, reserve_of(reserve_bytes, found.total), failed=False)
    for shard in shards:
        share = setting_bytes // len(shards) - OVERHEAD_BYTES
        more = (may - held) // len(shards)
        shard.limit_bytes = min(share, max(LEAST_BYTES, shard.file_bytes() + more))


class DiskRoom:
    """The room of one folder's shards. Writer threads fit them; any thread may read the rest."""

    def __init__(
        self,
        root: Path,
        slots: Sequence[ShardSlot],
        counts: DiskCounts,
        capacity_bytes: int,
        reserve_bytes: int | None,
        storage: Storage,
    ) -> None:
        self._root = root
        self._slots = slots
        self._counts = counts
        self._storage = storage
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()
        self._allowed = sum(slot.file_bytes() + OVERHEAD_BYTES for slot in slots)
        self.setting_bytes = capacity_bytes
        self.capacity_bytes = capacity_bytes  # at present
        self.limit = ""  # why that is less than the setting

    def fit(self, *, failed: bool = False) -> None:
        """Looks at the file system, and gives up what no longer fits."""
        with self._lock:
            files = [slot.file_bytes() for slot in self._slots]
            held = sum(files) + OVERHEAD_BYTES * len(files)
            self._look(held, failed=failed)
            share = self.setting_bytes // len(files) - OVERHEAD_BYTES
            more = (self._allowed - held) // len(files)
            for slot, num_bytes in zip(self._slots, files, strict=True):
                limit = min(share, max(LEAST_BYTES, num_bytes + more))
                if num_bytes <= limit:
                    with suppress(ShardDamaged), slot.use() as shard:
                        shard.limit_bytes = limit
                else:
                    self._shrink(slot, limit)

    def _look(self, held: int, *, failed: bool) -> None:
        try:
            found = self._storage.file_system(self._root)
        except StorageError:
            return  # writing will tell
        reserve = reserve_of(self._reserve_bytes, found.total)
        self._allowed = allowed(held, self._allowed, found, reserve, failed=failed)
        self.capacity_bytes = min(self.setting_bytes, self._allowed)
        was_limited, self.limit = self.limit, ""
        if self.capacity_bytes < self.setting_bytes:
            self.limit = (
                f"of {mib(self.setting_bytes)} the file system of {self._root} allows "
                f"{mib(self.capacity_bytes)}: it has {mib(found.free)} free, and "
                f"{mib(reserve)} are left to others (cache.disk_reserve_bytes)"
            )
        if bool(self.limit) is not bool(was_limited):
            logger.warning(f"disk cache: {self.limit or f'{self._root} has all its room again'}")

    def _shrink(self, slot: ShardSlot, limit: int) -> None:
        before = slot.file_bytes()
        try:
            num_evicted = self._evict(slot, limit)
        except ShardBusy:
            return
        except (*StorageError, ShardDamaged) as error:
            self._counts.fault(MissReason.IO_ERROR, 1, f"shrinking {slot.path}: {error}")
            with suppress(*StorageError):
                cannot_shrink = self.limit or getattr(error, "errno", 0) == errno.EOPNOTSUPP
                if not slot.mend(error) and cannot_shrink:
                    slot.clear(f"it does not shrink to {mib(limit)}: {slot.reason(error)}")
            return
        if num_evicted:
            logger.warning(
                f"disk cache: {num_evicted} blocks evicted from {slot.path}, which takes "
                f"{mib(slot.file_bytes())} instead of {mib(before)} of its file system"
            )

    def _evict(self, slot: ShardSlot, limit: int) -> int:
        """Evicts step by step, what is pinned or within a quota at last. Returns how many."""
        num_evicted = 0
        for spare in (True, False):
            while (held := slot.file_bytes()) > limit:
                step = max(limit, held - max(BITE_BYTES, held // BITES))
                evicted = self._step(slot, step, spare=spare)
                num_evicted += evicted
                if not evicted and slot.file_bytes() >= held:
                    break
        with slot.use() as shard:
            shard.limit_bytes = limit
        return num_evicted

    def _step(self, slot: ShardSlot, limit: int, *, spare: bool) -> int:
        num_evicted = 0
        with slot.use() as shard:
            shard.limit_bytes = limit
            shard.give_back()
            if slot.file_bytes() <= limit:
                return 0
            for _ in range(RELIEF_COMMITS):
                with shard.writing() as writer:
                    writer.make_room(0, spare=spare)
                self._counts.wrote(0, 0, writer.evicted)
                num_evicted += len(writer.evicted)
            shard.give_back()
        return num_evicted
