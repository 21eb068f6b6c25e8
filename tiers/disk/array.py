"""Several disks as one tier: each has its own folder, capacity, shards and writer.

A block's disk follows from its key and the names of the folders (rendezvous hashing), so that a
disk that is added takes its part of the keys and moves no others. Disks read and write side by
side, each on a thread of its own. A disk that fails, or does not open, costs its blocks and nothing
else: they are misses, and what would be written to it is refused.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TypeVar

import xxhash

from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.disk.directory import FORMAT, Meta
from tiers.disk.sampling import merged
from tiers.disk.tier import DiskTier
from tiers.disk.view import DiskView
from tiers.errors import ConfigurationError, MissReason
from tiers.tier import Age, Loaded, Removed, Sample, ShardStats, TierName, TierStats

logger = logging.getLogger(__name__)

SUMMED = (
    *("num_blocks", "used_bytes", "logical_bytes", "capacity_bytes", "hits", "misses"),
    *("stored", "evicted", "read_bytes", "written_bytes"),
)
READERS = 2  # threads of a disk that loads share

T = TypeVar("T")


class DiskArray:
    """Disks by folder. Made by `open_array`; a disk that did not open is None."""

    name = TierName.DISK

    def __init__(self, disks: Mapping[Path, DiskTier | None]) -> None:
        self._disks = dict(disks)
        self._seeds = {root: xxhash.xxh3_64_intdigest(str(root).encode()) for root in disks}
        self._readers = {
            root: ThreadPoolExecutor(READERS, thread_name_prefix=f"cachesvc-read-{root.name}")
            for root in disks
        }
        self._writers = {
            root: ThreadPoolExecutor(1, thread_name_prefix=f"cachesvc-write-{root.name}")
            for root in disks
        }

    def disk_of(self, key: PrefixKey) -> Path:
        """The folder whose blocks `key` belongs to."""
        return max(self._seeds, key=lambda root: xxhash.xxh3_64_intdigest(key, self._seeds[root]))

    def probe(self, ids: Sequence[BlockId]) -> int:
        parts = self._parts(ids)
        ends = [len(ids)]
        for root, numbers in parts.items():
            disk = self._disks[root]
            held = disk.probe([ids[number] for number in numbers]) if disk is not None else 0
            ends.append(numbers[held] if held < len(numbers) else len(ids))
        return min(ends)

    def load(self, ids: Sequence[BlockId], into: Sequence[Frame]) -> Loaded:
        """Each disk fills its frames; the leading run that all of them filled counts."""
        wanted = ids[: len(into)]
        parts = self._parts(wanted)

        def read(root: Path, numbers: list[int]) -> Loaded:
            disk = self._disks[root]
            if disk is None:
                return Loaded(0, MissReason.IO_ERROR)
            return disk.load([wanted[n] for n in numbers], [into[n] for n in numbers])

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
            disk = self._disks[root]
            if disk is None:
                return [ids[n].key for n in numbers]
            mine = [ages[n] for n in numbers] if ages else ()
            return disk.store([ids[n] for n in numbers], [frames[n] for n in numbers], mine)

        dropped = self._side_by_side(self._writers, parts, write)
        return [key for keys in dropped.values() for key in keys]

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        return sum(disk.discard(mine) for disk, mine in self._by_disk(keys))

    def keep(self, keys: Collection[PrefixKey]) -> None:
        for disk in self._open():
            disk.keep(keys)

    def demoted(self, keys: Sequence[PrefixKey], idle_s: Sequence[float]) -> None:
        idle = dict(zip(keys, idle_s, strict=True))
        for disk, mine in self._by_disk(keys):
            disk.demoted(mine, [idle[key] for key in mine])

    def held(self, keys: Sequence[PrefixKey]) -> list[bool]:
        """Which of these are held, each for itself. Raises what storage raises."""
        disks = [self._disks[self.disk_of(key)] for key in keys]
        return [
            disk is not None and disk.held([key])[0] for disk, key in zip(disks, keys, strict=True)
        ]

    def trace(self, key: PrefixKey) -> BlockId | None:
        disk = self._disks[self.disk_of(key)]
        return disk.trace(key) if disk is not None else None

    def read_record(self, key: PrefixKey) -> tuple[PrefixKey, bytes] | None:
        disk = self._disks[self.disk_of(key)]
        return disk.read_record(key) if disk is not None else None

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
        """Delete every block of these scopes; raises what storage raises, and ConfigurationError
        where a disk did not open, whose blocks cannot be reached."""
        lost = [str(root) for root, disk in self._disks.items() if disk is None]
        if lost:
            raise ConfigurationError(f"blocks in {', '.join(lost)} cannot be reached")
        return reduce(Removed.plus, (disk.purge(roots) for disk in self._open()), Removed())

    def count(self, roots: Collection[PrefixKey]) -> int:
        return sum(disk.count(roots) for disk in self._open())

    @contextmanager
    def view(self) -> Iterator[DiskView]:
        """Every disk's shards, as an inspector sees them."""
        with ExitStack() as stack:
            views = [stack.enter_context(disk.view()) for disk in self._open()]
            shards = [shard for view in views for shard in view.shards]
            map_bytes = max((shard.map_bytes for shard in shards), default=0)
            yield DiskView(next(iter(self._disks)), Meta(FORMAT, len(shards), map_bytes), shards)

    def stats(self) -> TierStats:
        """The sum of the disks. A shard is called by its disk; a disk that is lost, as a shard."""
        total = TierStats(name=self.name)
        shards: list[ShardStats] = []
        faults: Counter[MissReason] = Counter()
        for number, disk in enumerate(self._disks.values()):
            if disk is None:
                shards.append(ShardStats(f"disk-{number}", ready=False))
                continue
            mine = disk.stats()
            faults.update(mine.faults)
            shards += [replace(s, name=f"disk-{number}/{s.name}") for s in mine.shards]
            sums = {name: getattr(total, name) + getattr(mine, name) for name in SUMMED}
            total = replace(total, lives=mine.lives, **sums)
        return replace(total, shards=tuple(shards), faults=dict(faults))

    def close(self) -> None:
        for pool in (*self._readers.values(), *self._writers.values()):
            pool.shutdown()
        for disk in self._open():
            disk.close()

    def _open(self) -> list[DiskTier]:
        return [disk for disk in self._disks.values() if disk is not None]

    def _parts(self, ids: Sequence[BlockId]) -> dict[Path, list[int]]:
        """Places in `ids` by disk."""
        parts: dict[Path, list[int]] = {}
        for number, block in enumerate(ids):
            parts.setdefault(self.disk_of(block.key), []).append(number)
        return parts

    def _by_disk(self, keys: Sequence[PrefixKey]) -> Iterator[tuple[DiskTier, list[PrefixKey]]]:
        parts: dict[Path, list[PrefixKey]] = {}
        for key in keys:
            parts.setdefault(self.disk_of(key), []).append(key)
        for root, mine in parts.items():
            disk = self._disks[root]
            if disk is not None:
                yield disk, mine

    @staticmethod
    def _side_by_side(
        pools: Mapping[Path, ThreadPoolExecutor],
        parts: Mapping[Path, list[int]],
        work: Callable[[Path, list[int]], T],
    ) -> dict[Path, T]:
        if len(parts) == 1:
            return {root: work(root, numbers) for root, numbers in parts.items()}
        jobs = {root: pools[root].submit(work, root, numbers) for root, numbers in parts.items()}
        return {root: job.result() for root, job in jobs.items()}


def open_array(roots: Sequence[Path], open_one: Callable[[Path], DiskTier]) -> DiskArray:
    """Open a disk in each folder. One that does not open is left out, and said in the log.

    Raises DirectoryLocked where another server holds one; ConfigurationError where none opens, or
    a folder is named twice.
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
            raise ConfigurationError(f"none of the disk caches opens: {', '.join(map(str, roots))}")
    except BaseException:
        for disk in disks.values():
            if disk is not None:
                disk.close()
        raise
    return DiskArray(disks)
