"""The disk tier: blocks in LMDB shards, compressed, bounded, and verified on every read.

Its folder is described in `tiers.disk.directory`. `Mover`'s reader threads call `probe` and `load`,
and its one writer thread calls `store`, `discard` and `flush`. Any thread may call `stats`.

A block that cannot be served is a miss with a reason. These methods raise no error of LMDB, the
file system or the data. An unreadable record is condemned and deleted by the next write. A shard
with an LMDB error, or with a truncated or removed file, is checked. If its structure is broken, it
is replaced by an empty one.
"""

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.blocks.part import Part
from tiers.disk.counts import DiskCounts
from tiers.disk.directory import FORMAT, DirectoryLock, Meta, note_blocks, shard_of
from tiers.disk.events import DiskEvents
from tiers.disk.format.payload import joined, proven
from tiers.disk.format.record import (
    Header,
    block_key,
    is_window,
    unpack_header,
    whole_nbytes,
    window_key,
)
from tiers.disk.format.rows import IndexEntry
from tiers.disk.guard import DiskGuard
from tiers.disk.inspection.maintenance import count, purge
from tiers.disk.inspection.view import DiskView
from tiers.disk.reader import BlockReader, Scratch
from tiers.disk.readers import readers_for
from tiers.disk.room import DiskRoom
from tiers.disk.settings import DiskSettings
from tiers.disk.shard import Shard, ShardBusy, ShardDamaged
from tiers.disk.slot import ShardSlot
from tiers.disk.storage import PageBuffer, StorageError
from tiers.disk.writer import BlockWriter
from tiers.errors import TierClosed
from tiers.tier import Age, Loaded, ManagedTier, Removed, ShardStats, TierName, TierStats

logger = logging.getLogger(__name__)


class DiskTier(ManagedTier):
    """An opened folder of shards. Made by `tiers.disk.open.open_disk`."""

    name = TierName.DISK

    def __init__(
        self,
        root: Path,
        layout: BlockLayout,
        slots: Sequence[ShardSlot],
        lock: DirectoryLock,
        settings: DiskSettings,
        *,
        room: DiskRoom,
        guard: DiskGuard,
        counts: DiskCounts,
        events: DiskEvents,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root = root
        self.layout = layout
        self.settings = settings
        self._slots = slots
        self._lock = lock
        self._events = events
        self._clock = clock
        self._guard = guard
        self._counts = counts
        self._beside: list[DiskTier] = []
        scratch = Scratch(layout.torch_dtype.itemsize if settings.compresses else 1)
        self._reader = BlockReader(slots, layout, scratch, counts)
        self._room = room
        self._writer = BlockWriter(slots, layout, scratch, counts, settings, guard, room, clock)
        self._writer.recount()
        self._closed = False

    def beside(self, layout: BlockLayout) -> "DiskTier":
        """The same folder for blocks of another layout, in one order of eviction. It closes with
        this one. The writer of both is one thread."""
        other = DiskTier(
            self.root,
            layout,
            self._slots,
            self._lock,
            self.settings,
            room=self._room,
            guard=self._guard,
            counts=self._counts,
            events=self._events,
            clock=self._clock,
        )
        self._beside.append(other)
        return other

    @property
    def num_readers(self) -> int:
        return readers_for(computes_elsewhere=self.settings.computes_elsewhere)

    @property
    def capacity_bytes(self) -> int:
        return self._room.capacity_bytes

    def probe(self, ids: Sequence[BlockId]) -> int:
        """Length of the leading run held, by key alone; `load` verifies identities."""
        self._check_open()
        return self._reader.num_held(ids)

    def load(self, ids: Sequence[BlockId], into: Sequence[Frame]) -> Loaded:
        """Fills `into[i]` with block `ids[i]`, verified, up to the first that fails."""
        self._check_open()
        wanted = ids[: len(into)]
        found, reason = self._reader.find(wanted)
        if reason is not None:
            self._reader.refuse(wanted[len(found)], reason)
        records, lacking = self._reader.records(wanted, found, into)
        if lacking is not None:
            self._reader.refuse(wanted[len(records)], lacking)
        loaded = self._reader.load(records, into[: len(records)])
        served = found[: loaded.num_blocks]
        read = [place for places in records[: loaded.num_blocks] for place in places]
        self._counts.loaded(
            num_loaded=len(served),
            num_missed=len(wanted) - len(served),
            read_bytes=sum(place.entry.place.nbytes for place in read),
        )
        self._events.served([place.entry for place in served])
        now_s = self._clock()
        windows = {place.key for place in read if is_window(place.key)}
        for number in range(len(self._slots)):
            # Tail first, so that a prefix outlives its continuations.
            keys = [place.key for place in reversed(served) if place.number == number]
            uses = [(key, int(now_s)) for key in _with_windows(keys, windows)]
            self._counts.use(number, uses, duplicated=self.settings.moves)
        ages = tuple(max(0.0, now_s - place.header.computed_s) for place in served)
        return Loaded(len(served), loaded.reason or lacking or reason, ages=ages)

    def have_windows(self, ids: Sequence[BlockId]) -> list[bool]:
        self._check_open()
        return self._reader.have_windows([block.key for block in ids])

    def store(
        self, ids: Sequence[BlockId], frames: Sequence[Frame], ages: Sequence[Age] = ()
    ) -> list[PrefixKey]:
        """Writes blocks not yet held, shards in parallel. Returns the keys dropped since the last
        call for room or age, and those not written."""
        self._check_open()
        self._writer.store(ids, frames, ages)
        return self._counts.take_dropped()

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        """Deletes these blocks, except those to `keep`. Returns the number held."""
        self._check_open()
        return self._writer.discard(keys)

    def keep(self, keys: Collection[PrefixKey]) -> None:
        """From now on these are dropped neither for room nor for age nor on request."""
        self._guard.keep(frozenset(keys))

    def demoted(
        self, keys: Sequence[PrefixKey], idle_s: Sequence[float], windows: Sequence[bool] = ()
    ) -> None:
        """The tiers above dropped these: they move to the recent end of the order."""
        now_s = self._clock()
        used = {key: max(0, int(now_s - idle)) for key, idle in zip(keys, idle_s, strict=True)}
        with_windows = {
            window_key(key)
            for key, needed in zip(keys, windows, strict=False)
            if needed and self.layout.apart
        }
        uses = [(key, used[block_key(key)]) for key in _with_windows(keys, with_windows)]
        for number in range(len(self._slots)):
            mine = [use for use in uses if shard_of(use[0], len(self._slots)) == number]
            self._counts.use(number, mine, duplicated=False)

    def held(self, keys: Sequence[PrefixKey]) -> list[bool]:
        """Whether each of these is held. Raises storage errors."""
        return [bool(self._find(key)) for key in keys]

    def trace(self, key: PrefixKey) -> BlockId | None:
        """The identity of the block with this key, if its header is readable."""
        found = self._find(key)
        header = unpack_header(found[0].header) if found else None
        return header.block_id if isinstance(header, Header) else None

    def read_record(self, key: PrefixKey) -> tuple[PrefixKey, bytes] | None:
        """The scope of a block and its stored record, verified; None if it is not held. With its
        window part, if that is held in a record of its own."""
        self._check_open()
        found = self._read_one(key)
        if found is None:
            return None
        header, record = found
        if header.part is Part.LASTING and (window := self._read_one(window_key(key))) is not None:
            record = joined(record, window[1])
        return header.scope, record

    def _read_one(self, key: PrefixKey) -> tuple[Header, bytes] | None:
        try:
            with self._slots[shard_of(key, len(self._slots))].read() as shard:
                for entry in shard.find([key]):
                    buffer = PageBuffer().take(shard.room_for(entry))
                    record = shard.read(key, entry, buffer)
                    header = proven(record, key)
                    if isinstance(header, Header):
                        return header, bytes(record[: whole_nbytes(record, header)])
        except (*StorageError, ShardDamaged):
            return None
        return None

    def _find(self, key: PrefixKey) -> list[IndexEntry]:
        self._check_open()
        with self._slots[shard_of(key, len(self._slots))].read() as shard:
            return shard.find([key])

    def quotas(self) -> Mapping[Hashable, tuple[int, int]]:
        """Per group: (used, share) in bytes; empty without quotas."""
        return self._guard.usage()

    def flush(self) -> None:
        """Makes everything stored durable, including the order of eviction learned from hits."""
        self._check_open()
        self._writer.flush()

    def stats(self) -> TierStats:
        totals, used_bytes, shards = [], 0, []
        for slot in self._slots:
            try:
                with slot.read() as shard:
                    state = ShardStats(slot.path.name, ready=False, checking=True)
                    if isinstance(shard, Shard):
                        used = shard.used_bytes()
                        state = ShardStats(slot.path.name, True, shard.room_bytes, used)
                    totals.append(shard.totals)
                    used_bytes += shard.file_bytes()
            except (*StorageError, ShardDamaged):
                state = ShardStats(slot.path.name, ready=False)
            shards.append(replace(state, failing=slot.failing, repaired=slot.repaired))
        return replace(
            self._counts.snapshot(),
            num_blocks=sum(total.num_blocks for total in totals),
            used_bytes=used_bytes,
            logical_bytes=sum(total.logical_bytes for total in totals),
            capacity_bytes=self.capacity_bytes,
            setting_bytes=self._room.setting_bytes,
            limit=self._room.limit,
            lives=self._events.lives(),
            shards=tuple(shards),
        )

    @contextmanager
    def view(self) -> Iterator[DiskView]:
        """A view for inspection: blocks, accounts by scope. Skips shards that are
        being checked or replaced. Raises storage errors."""
        with ExitStack() as stack:
            shards = []
            for slot in self._slots:
                with suppress(ShardBusy):
                    shards.append(stack.enter_context(slot.use()))
            yield self._view(shards)

    @contextmanager
    def _whole_view(self) -> Iterator[DiskView]:
        """The same for every shard. Raises ShardBusy if one is being checked or replaced."""
        with ExitStack() as stack:
            yield self._view([stack.enter_context(slot.use()) for slot in self._slots])

    def _view(self, shards: Sequence[Shard]) -> DiskView:
        self._check_open()
        map_bytes = max((shard.map_bytes for shard in shards), default=0)
        total = self._room.setting_bytes
        meta = Meta(FORMAT, len(self._slots), map_bytes, capacity_bytes=total)
        return DiskView(self.root, meta, shards)

    def purge(self, roots: Collection[PrefixKey]) -> Removed:
        """Deletes every block of these scopes. Raises storage errors and ShardBusy."""
        with self._whole_view() as view:
            removed = purge(view.shards, roots)
        self._writer.recount()
        return removed

    def count(self, roots: Collection[PrefixKey]) -> int:
        """The number of blocks of these scopes, by a full scan. Raises like `purge`."""
        with self._whole_view() as view:
            return count(view.shards, roots)

    def close(self) -> None:
        """Flushes, records the number of blocks, and releases the folder."""
        if self._closed:
            return
        self._writer.flush()
        num_blocks = self.stats().num_blocks
        for tier in (self, *self._beside):
            tier._closed = True
            tier._writer.close()
        for slot in self._slots:
            slot.close()
        try:
            note_blocks(self.root, num_blocks)
        except OSError as error:
            logger.warning(f"disk cache: {self.root} cannot be written as it closes: {error}")
        self._lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosed(f"the disk cache in {self.root} is closed")


def _with_windows(keys: Sequence[PrefixKey], windows: Collection[PrefixKey]) -> list[PrefixKey]:
    """The keys of blocks in order of use, after those of their window parts in `windows`. A window
    part that is as old as a block leaves before it."""
    if not windows:
        return list(keys)
    parts = [window_key(key) for key in keys]
    return [*(part for part in parts if part in windows), *keys]
