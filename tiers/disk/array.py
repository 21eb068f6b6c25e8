"""Several disks as one tier: each has its own folder, capacity, shards and writer.

A block's disk follows from its key (`DiskChoice`). Disks read and write in parallel, each on its
own threads. A disk that does not open, or fails repeatedly, is dropped until the next start. Its
blocks are misses, and the other disks take over its keys.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TypeVar

from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.disk.directory import FORMAT, DiskChoice, Meta, disk_id
from tiers.disk.inspection.view import DiskView
from tiers.disk.readers import readers_for
from tiers.disk.sampling import merged
from tiers.disk.tier import DiskTier
from tiers.errors import ConfigurationError, MissReason
from tiers.tier import Age, Loaded, ManagedTier, Removed, Sample, ShardStats, TierName, TierStats

logger = logging.getLogger(__name__)

SUMMED = (
    *("num_blocks", "used_bytes", "logical_bytes", "capacity_bytes", "setting_bytes"),
    *("hits", "misses"),
    *("stored", "evicted", "read_bytes", "written_bytes"),
)
MAX_FAULTS = 8  # consecutive failures, after which a disk is dropped

T = TypeVar("T")


class DiskArray(ManagedTier):
    """Disks by folder. Made by `open_array`; a disk that did not open is None."""

    name = TierName.DISK

    def __init__(self, disks: Mapping[Path, DiskTier | None]) -> None:
        self._disks = dict(disks)
        opened = [root for root, disk in disks.items() if disk is not None]
        self._spread = DiskChoice({root: _id_of(root) for root in opened})
        self._lock = threading.Lock()
        self._num_faults: Counter[Path] = Counter()  # consecutive
        each = -(-self.num_readers // len(opened))
        self._readers = {
            root: ThreadPoolExecutor(each, thread_name_prefix=f"cachesvc-read-{root.name}")
            for root in disks
        }
        for disk in self._open():
            disk.read_by(each)
        self._writers = {
            root: ThreadPoolExecutor(1, thread_name_prefix=f"cachesvc-write-{root.name}")
            for root in disks
        }

    def disk_of(self, key: PrefixKey) -> Path:
        """The folder of the disk for `key`."""
        return self._spread.disk_of(key)

    @property
    def num_readers(self) -> int:
        disks = self._open()
        elsewhere = all(disk.settings.computes_elsewhere for disk in disks)
        return readers_for(len(disks), computes_elsewhere=elsewhere)

    def paced(self, prefill_tokens_per_s: float) -> None:
        for disk in self._open():
            disk.paced(prefill_tokens_per_s)

    def probe(self, ids: Sequence[BlockId]) -> int:
        parts = self._parts(ids)
        ends = [len(ids)]
        for root, numbers in parts.items():
            held = self._disk(root).probe([ids[number] for number in numbers])
            ends.append(numbers[held] if held < len(numbers) else len(ids))
        return min(ends)

    def load(self, ids: Sequence[BlockId], into: Sequence[Frame]) -> Loaded:
        """Each disk fills its frames. The leading run of filled frames counts."""
        wanted = ids[: len(into)]
        parts = self._parts(wanted)

        def read(root: Path, numbers: list[int]) -> Loaded:
            loaded = self._disk(root).load([wanted[n] for n in numbers], [into[n] for n in numbers])
            self._watch(root, failed=loaded.reason is MissReason.IO_ERROR)
            return loaded

        found = self._side_by_side(self._readers, parts, read)
        end, reason = len(wanted), None
        ages = [0.0] * len(wanted)
        for root, loaded in found.items():
            numbers = parts[root]
            for number, age in zip(numbers, loaded.ages, strict=False):
                ages[number] = age
            if loaded.num_blocks < len(numbers) and numbers[loaded.num_blocks] < end:
                end, reason = numbers[loaded.num_blocks], loaded.reason
        return Loaded(end, reason, ages=tuple(ages[:end]))

    def store(
        self, ids: Sequence[BlockId], frames: Sequence[Frame], ages: Sequence[Age] = ()
    ) -> list[PrefixKey]:
        parts = self._parts(ids)

        def write(root: Path, numbers: list[int]) -> list[PrefixKey]:
            disk = self._disk(root)
            mine = [ages[n] for n in numbers] if ages else ()
            before = disk.counted()
            dropped = disk.store([ids[n] for n in numbers], [frames[n] for n in numbers], mine)
            after = disk.counted()
            faults = [counted.faults.get(MissReason.IO_ERROR, 0) for counted in (before, after)]
            self._watch(root, failed=faults[1] > faults[0] and after.stored == before.stored)
            return dropped

        dropped = self._side_by_side(self._writers, parts, write)
        return [key for keys in dropped.values() for key in keys]

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        """Asks all disks, because a block may be on two if one was absent for a while."""
        return sum(disk.discard(keys) for disk in self._open())

    def keep(self, keys: Collection[PrefixKey]) -> None:
        for disk in self._open():
            disk.keep(keys)

    def have_windows(self, ids: Sequence[BlockId]) -> list[bool]:
        there = [False] * len(ids)
        for root, numbers in self._parts(ids).items():
            found = self._disk(root).have_windows([ids[number] for number in numbers])
            for number, windows in zip(numbers, found, strict=True):
                there[number] = windows
        return there

    def demoted(
        self, keys: Sequence[PrefixKey], idle_s: Sequence[float], windows: Sequence[bool] = ()
    ) -> None:
        idle = dict(zip(keys, idle_s, strict=True))
        needed = dict(zip(keys, windows, strict=False))
        for disk, mine in self._by_disk(keys):
            of_mine = [needed[key] for key in mine] if needed else ()
            disk.demoted(mine, [idle[key] for key in mine], of_mine)

    def held(self, keys: Sequence[PrefixKey]) -> list[bool]:
        """Whether each of these is held. Raises storage errors."""
        return [self._disk(self.disk_of(key)).held([key])[0] for key in keys]

    def trace(self, key: PrefixKey) -> BlockId | None:
        return self._disk(self.disk_of(key)).trace(key)

    def read_record(self, key: PrefixKey) -> tuple[PrefixKey, bytes] | None:
        return self._disk(self.disk_of(key)).read_record(key)

    def quotas(self) -> Mapping[Hashable, tuple[int, int]]:
        total: dict[Hashable, tuple[int, int]] = {}
        for disk in self._open():
            for group, (used, share) in disk.quotas().items():
                before = total.get(group, (0, 0))
                total[group] = before[0] + used, before[1] + share
        return total

    def flush(self) -> None:
        everywhere: dict[Path, list[int]] = {root: [] for root in self._disks}

        def flush(root: Path, _: list[int]) -> None:
            disk = self._disks[root]
            if disk is not None:
                disk.flush()

        self._side_by_side(self._writers, everywhere, flush)

    def sample(self, max_keys: int) -> Sample:
        return merged([disk.sample(max_keys) for disk in self._open()], max_keys)

    def purge(self, roots: Collection[PrefixKey]) -> Removed:
        """Deletes every block of these scopes.

        Raises storage errors, and ConfigurationError if a disk did not open, because its blocks
        cannot be reached.
        """
        lost = [str(root) for root, disk in self._disks.items() if disk is None]
        if lost:
            raise ConfigurationError(f"blocks in {', '.join(lost)} cannot be reached")
        return reduce(Removed.plus, (disk.purge(roots) for disk in self._open()), Removed())

    def count(self, roots: Collection[PrefixKey]) -> int:
        return sum(disk.count(roots) for disk in self._open())

    @contextmanager
    def view(self) -> Iterator[DiskView]:
        """A view of every disk's shards."""
        with ExitStack() as stack:
            views = [stack.enter_context(disk.view()) for disk in self._open()]
            shards = [shard for view in views for shard in view.shards]
            map_bytes = max((shard.map_bytes for shard in shards), default=0)
            total = sum(view.meta.setting_bytes for view in views)
            meta = Meta(FORMAT, len(shards), map_bytes, capacity_bytes=total)
            yield DiskView(next(iter(self._disks)), meta, shards)

    def stats(self) -> TierStats:
        """The sum of the disks. A shard is named by its disk; a lost disk counts as a lost
        shard."""
        total = TierStats(name=self.name)
        shards: list[ShardStats] = []
        faults: Counter[MissReason] = Counter()
        for number, (root, disk) in enumerate(self._disks.items()):
            if disk is None or root not in self._spread:
                shards.append(ShardStats(f"disk-{number}", ready=False))
                continue
            mine = disk.stats()
            faults.update(mine.faults)
            shards += [replace(s, name=f"disk-{number}/{s.name}") for s in mine.shards]
            sums = {name: getattr(total, name) + getattr(mine, name) for name in SUMMED}
            limit = "; ".join(filter(None, [total.limit, mine.limit]))
            total = replace(total, lives=mine.lives, limit=limit, **sums)
        return replace(total, shards=tuple(shards), faults=dict(faults))

    def close(self) -> None:
        for pool in (*self._readers.values(), *self._writers.values()):
            pool.shutdown()
        for disk in self._open():
            disk.close()

    def _disk(self, root: Path) -> DiskTier:
        disk = self._disks[root]
        assert disk is not None, f"{root} did not open"
        return disk

    def _watch(self, root: Path, *, failed: bool) -> None:
        """Drops a disk that fails repeatedly, unless it is the last one."""
        if not failed and not self._num_faults[root]:
            return
        with self._lock:
            self._num_faults[root] = self._num_faults[root] + 1 if failed else 0
            if self._num_faults[root] < MAX_FAULTS or root not in self._spread:
                return
            if any(shard.checking for shard in self._disk(root).stats().shards):
                return  # it will be writable again after that
            if len(self._spread) > 1:
                self._spread = self._spread.without(root)
                logger.error(
                    f"disk cache: {root} failed {MAX_FAULTS} times in a row and is dropped; the "
                    "other disks take its blocks. Replace it, or restart to try it again"
                )

    def _open(self) -> list[DiskTier]:
        return [disk for disk in self._disks.values() if disk is not None]

    def _parts(self, ids: Sequence[BlockId]) -> dict[Path, list[int]]:
        """Indices into `ids` by disk."""
        parts: dict[Path, list[int]] = {}
        for number, block in enumerate(ids):
            parts.setdefault(self.disk_of(block.key), []).append(number)
        return parts

    def _by_disk(self, keys: Sequence[PrefixKey]) -> Iterator[tuple[DiskTier, list[PrefixKey]]]:
        parts: dict[Path, list[PrefixKey]] = {}
        for key in keys:
            parts.setdefault(self.disk_of(key), []).append(key)
        for root, mine in parts.items():
            yield self._disk(root), mine

    @staticmethod
    def _side_by_side(
        pools: Mapping[Path, ThreadPoolExecutor],
        parts: Mapping[Path, list[int]],
        work: Callable[[Path, list[int]], T],
    ) -> dict[Path, T]:
        """Each disk's part on that disk's own threads, so that no others keep a record's memory."""
        jobs = {root: pools[root].submit(work, root, numbers) for root, numbers in parts.items()}
        return {root: job.result() for root, job in jobs.items()}


def _id_of(root: Path) -> bytes:
    try:
        return disk_id(root)
    except OSError:
        return str(root).encode()


def open_array(roots: Sequence[Path], open_one: Callable[[Path], DiskTier]) -> DiskArray:
    """Opens a disk in each folder. One that does not open is skipped and logged.

    Raises DirectoryLocked if another server holds one, and ConfigurationError if none opens or a
    folder is named twice.
    """
    if len({root.resolve() for root in roots}) < len(roots):
        raise ConfigurationError("a directory of the disk cache is named twice")
    disks: dict[Path, DiskTier | None] = {}
    try:
        for root in roots:
            try:
                disks[root] = open_one(root)
            except (ConfigurationError, OSError) as error:
                logger.error(f"disk cache: {root} is left out: {error}")
                disks[root] = None
        if not any(disks.values()):
            raise ConfigurationError(
                f"none of the disk caches can be opened: {', '.join(map(str, roots))}"
            )
    except BaseException:
        for disk in disks.values():
            if disk is not None:
                disk.close()
        raise
    return DiskArray(disks)
