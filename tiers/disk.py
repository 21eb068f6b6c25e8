"""The disk tier: blocks in LMDB shards, compressed, bounded, and verified on every read.

Lives in the folder that `tiers.disk_directory` describes. `Mover`'s reader threads call `probe` and
`load`, its one writer thread `store`, `discard` and `flush`; any thread may ask for `stats`.

What cannot be served is a miss with its reason: no error of LMDB, of the file system or of the
bytes themselves leaves `probe`, `load`, `store` or `discard`. A record that proves unreadable is
condemned and deleted by the next write; a shard whose file was cut or removed is replaced by an
empty one.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tiers.block import BlockLayout
from tiers.codec import Codec, DecodeError, bound
from tiers.disk_accounts import Account, Day, Entry
from tiers.disk_directory import DirectoryLock, mark
from tiers.disk_slot import ShardSlot
from tiers.disk_storage import MapFull, Panic, StorageError
from tiers.errors import MissReason, TierClosed
from tiers.frames import Frame
from tiers.keys import BlockId, PrefixKey
from tiers.record import (
    Header,
    check_payload,
    header_nbytes,
    is_block,
    pack_header,
    unpack_header,
)
from tiers.shard import ShardDamaged
from tiers.shard_writer import MIN_RECORD, Record, Writer
from tiers.tier import Loaded, TierName, TierStats

logger = logging.getLogger(__name__)

BATCH_BYTES = 8 << 20  # logical bytes written in one transaction, at most; one block at least
MAX_PENDING = 16_384  # hits remembered between two writes; more are not moved in the order
EXPIRE_AT_ONCE = 256
MAX_TRIES = 3
RELIEF_COMMITS = 3  # pages freed by the first can be used after the third


class DiskOrder(StrEnum):
    """Which block leaves first. The order is on disk, so it survives a restart."""

    LRU = "lru"  # the one unused the longest; a hit moves a block, together with the next write
    FIFO = "fifo"  # the one written first; a hit costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """How the tier behaves; what it is and where, `open_disk` is told."""

    order: DiskOrder = DiskOrder.LRU
    idle_ttl_s: int | None = None  # forget blocks nobody used for so long
    write_budget_bytes: int | None = None  # a day; past it, blocks are not written
    batch_bytes: int = BATCH_BYTES


class _Found(NamedTuple):
    slot: ShardSlot
    entry: Entry
    header: Header


class _Scratch(threading.local):
    """Each thread's codec and its room for one record."""

    def __init__(self, item_bytes: int) -> None:
        self.codec = Codec(item_bytes)
        self._room = np.empty(1, np.uint64).data.cast("B")

    def room(self, nbytes: int) -> memoryview:
        """At least `nbytes`, aligned to 16; valid until the next call."""
        if len(self._room) < nbytes:
            self._room = np.empty(-(-nbytes // 8), np.uint64).data.cast("B")
        return self._room


@dataclass(slots=True)
class _Counts:
    """What happened since the tier was opened; guarded by the tier's lock."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: list[PrefixKey] = field(default_factory=list)  # since `store` last told
    read_bytes: int = 0
    written_bytes: int = 0
    faults: Counter[MissReason] = field(default_factory=Counter)


@dataclass(slots=True)
class _Pending:
    """What readers learnt and the next write puts on disk; guarded by the tier's lock."""

    used: dict[PrefixKey, None] = field(default_factory=dict)  # least recent first
    condemned: set[PrefixKey] = field(default_factory=set)
    hit_bytes: int = 0
    num_hits: int = 0


class DiskTier:
    """An opened folder of shards. Made by `tiers.disk_open.open_disk`."""

    name = TierName.DISK

    def __init__(
        self,
        root: Path,
        layout: BlockLayout,
        capacity_bytes: int,
        slots: Sequence[ShardSlot],
        lock: DirectoryLock,
        settings: DiskSettings,
        *,
        clock: Callable[[], float] = time.time,
        faults: Counter[MissReason] | None = None,
    ) -> None:
        self.root = root
        self.layout = layout
        self.capacity_bytes = capacity_bytes
        self.settings = settings
        self._slots = list(slots)
        self._dir_lock = lock
        self._clock = clock
        self._layout_digest = layout.digest()
        self._item_bytes = layout.torch_dtype.itemsize
        self._scratch = _Scratch(self._item_bytes)
        self._mutex = threading.Lock()
        self._counts = _Counts(faults=Counter(faults or {}))
        self._pending = [_Pending() for _ in self._slots]
        self._closed = False

    # Reading

    def probe(self, ids: Sequence[BlockId]) -> int:
        """Length of the leading run held, by identity; payloads are not looked at."""
        return len(self._find(ids)[0])

    def load(self, ids: Sequence[BlockId], into: Sequence[Frame]) -> Loaded:
        """Fill `into[i]` with block `ids[i]`, verified; stop at the first that cannot be served."""
        wanted = list(ids[: len(into)])
        found, reason = self._find(wanted)
        self._read_ahead(found)
        num_loaded = read_bytes = 0
        for place, block, frame in zip(found, wanted, into, strict=False):
            why = self._fill(place, block, frame.buffer)
            if why is not None:
                reason = why
                break
            num_loaded += 1
            read_bytes += place.entry.place.nbytes
        self._count_load(wanted, num_loaded, read_bytes, reason)
        return Loaded(num_loaded, reason)

    def _find(self, ids: Sequence[BlockId]) -> tuple[list[_Found], MissReason | None]:
        """The leading run that the index knows by identity and layout; why it ends early."""
        self._check_open()
        entries = [iter(self._find_in(slot, ids)) for slot in self._slots]
        found: list[_Found] = []
        for block in ids:
            number = self._shard_of(block.key)
            entry = next(entries[number], None)
            if entry is None:
                return found, MissReason.ABSENT
            header = unpack_header(entry.header)
            if isinstance(header, MissReason):
                self._condemn(block.key, header)
                return found, header
            if not is_block(entry.header, block):
                return found, MissReason.COLLISION
            if (header.layout, header.logical_nbytes) != (self._layout_digest, self.layout.nbytes):
                return found, MissReason.LAYOUT
            found.append(_Found(self._slots[number], entry, header))
        return found, None

    def _find_in(self, slot: ShardSlot, ids: Sequence[BlockId]) -> list[Entry]:
        keys = [block.key for block in ids if self._slot_of(block.key) is slot]
        if not keys:
            return []
        try:
            with slot.use() as shard:
                return shard.find(keys)
        except (*StorageError, ShardDamaged) as error:
            self._fault(MissReason.IO_ERROR, f"looking up in {slot.path}", error)
            return []

    def _read_ahead(self, found: Sequence[_Found]) -> None:
        if len(found) < 2:
            return
        for slot in self._slots:
            entries = [place.entry for place in found if place.slot is slot]
            try:
                with slot.use() as shard:
                    shard.will_need(entries)
            except (*StorageError, ShardDamaged):
                return  # only a hint; the read itself will say what is wrong

    def _fill(self, found: _Found, block: BlockId, into: memoryview) -> MissReason | None:
        """Read, verify and decode one record into a frame."""
        why = self._fill_once(found, block, into)
        if why is None or why == MissReason.IO_ERROR:
            return why
        if self._moved(found, block.key):
            return MissReason.ABSENT  # evicted while it was read; its pages hold something else
        self._condemn(block.key, why)
        return why

    def _fill_once(self, found: _Found, block: BlockId, into: memoryview) -> MissReason | None:
        slot, entry, header = found
        if len(into) != header.logical_nbytes:
            return MissReason.LAYOUT
        room = self._scratch.room(entry.place.nbytes)
        try:
            with slot.use() as shard:
                nbytes = shard.read(block.key, entry, room)
        except (*StorageError, ShardDamaged) as error:
            self._fault(MissReason.IO_ERROR, f"reading a block from {slot.path}", error)
            return MissReason.IO_ERROR
        start = len(entry.header)
        end = start + header.payload_nbytes
        if nbytes < end:
            return MissReason.TORN
        if room[:start] != entry.header:
            stands = unpack_header(room[:nbytes])
            return stands if isinstance(stands, MissReason) else MissReason.CHECKSUM
        payload = room[start:end]
        why = check_payload(header, payload)
        if why is not None:
            return why
        try:
            self._scratch.codec.decode(header.codec, payload, into)
        except DecodeError:
            return MissReason.DECODE
        return None

    def _moved(self, found: _Found, key: PrefixKey) -> bool:
        try:
            with found.slot.use() as shard:
                now = shard.find([key])
        except (*StorageError, ShardDamaged):
            return False
        return not now or now[0].place.offset != found.entry.place.offset

    def _count_load(
        self, ids: Sequence[BlockId], num_loaded: int, read_bytes: int, reason: MissReason | None
    ) -> None:
        with self._mutex:
            self._counts.hits += num_loaded
            self._counts.misses += len(ids) - num_loaded
            self._counts.read_bytes += read_bytes
            if reason == MissReason.COLLISION or reason == MissReason.LAYOUT:
                self._counts.faults[reason] += 1
            # Tail first, so that a prefix outlives what follows it.
            for block in reversed(ids[:num_loaded]):
                pending = self._pending[self._shard_of(block.key)]
                pending.num_hits += 1
                pending.hit_bytes += self.layout.nbytes
                if self.settings.order is DiskOrder.LRU and len(pending.used) < MAX_PENDING:
                    pending.used.pop(block.key, None)
                    pending.used[block.key] = None

    # Writing

    def store(self, ids: Sequence[BlockId], frames: Sequence[Frame]) -> list[PrefixKey]:
        """Write blocks not yet held, side by side.

        Returns the keys dropped since the last call, for room or for age.
        """
        self._check_open()
        for slot in self._slots:
            pairs = [
                pair for pair in zip(ids, frames, strict=True) if self._slot_of(pair[0].key) is slot
            ]
            at_once = max(1, self.settings.batch_bytes // self.layout.nbytes)
            rest = iter(pairs)
            while batch := list(islice(rest, at_once)):
                self._write(slot, batch)
        with self._mutex:
            dropped, self._counts.dropped = self._counts.dropped, []
        return dropped

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        """Forget these blocks; returns how many were held."""
        self._check_open()
        total = 0
        for slot in self._slots:
            mine = [key for key in keys if self._slot_of(key) is slot]
            if not mine:
                continue
            try:
                with self._transaction(slot) as writer:
                    total += sum(writer.delete(key) for key in mine)
            except (*StorageError, ShardDamaged) as error:
                self._fault(MissReason.IO_ERROR, f"discarding from {slot.path}", error)
                self._mend(slot, error)
        return total

    def flush(self) -> None:
        """Make everything stored durable, and what hits taught the order of eviction."""
        self._check_open()
        for slot in self._slots:
            try:
                with self._transaction(slot):
                    pass
                with slot.use() as shard:
                    shard.forget_dead_readers()
                    shard.sync()
            except (*StorageError, ShardDamaged) as error:
                self._fault(MissReason.IO_ERROR, f"flushing {slot.path}", error)
                self._mend(slot, error)

    def _write(self, slot: ShardSlot, batch: list[tuple[BlockId, Frame]]) -> None:
        """One batch, tried again after a full map or damage to the shard."""
        for _ in range(MAX_TRIES):
            try:
                self._write_once(slot, batch)
                return
            except MapFull:
                self._relieve(slot, len(batch) * self.layout.nbytes)
            except (*StorageError, ShardDamaged) as error:
                self._fault(MissReason.IO_ERROR, f"writing to {slot.path}", error, len(batch))
                if not self._mend(slot, error):
                    return
        self._fault(MissReason.NO_ROOM, f"writing to {slot.path}", None, len(batch))

    def _write_once(self, slot: ShardSlot, batch: list[tuple[BlockId, Frame]]) -> None:
        with self._transaction(slot) as writer:
            fresh = []
            for block, frame in batch:
                entry = writer.find(block.key)
                if entry is not None and is_block(entry.header, block):
                    writer.touch(block.key, writer.take_sequences(1))
                else:
                    fresh.append((block, frame))
            self._admit(writer, fresh)

    def _admit(self, writer: Writer, fresh: list[tuple[BlockId, Frame]]) -> None:
        """Evict for these blocks and put them; the head of the run is the last to leave."""
        budget = self.settings.write_budget_bytes
        need = sum(self._record_bound(block) for block, _ in fresh)
        if budget is not None and need and writer.written_today() + need > budget:
            with self._mutex:
                self._counts.faults[MissReason.OVERLOADED] += len(fresh)
            return
        if need:
            writer.make_room(need)
        first = writer.take_sequences(len(fresh))
        for number, (block, frame) in enumerate(fresh):
            writer.delete(block.key)  # a collision: the block asked for last stays
            writer.put(self._encode(block, frame.buffer), first + len(fresh) - 1 - number)

    def _record_bound(self, block: BlockId) -> int:
        return max(MIN_RECORD, header_nbytes(block) + bound(self.layout.nbytes))

    def _encode(self, block: BlockId, buffer: memoryview) -> Record:
        room = self._scratch.room(self._record_bound(block))
        start = header_nbytes(block)
        codec, nbytes = self._scratch.codec.encode(buffer, room[start:])
        header = pack_header(
            block,
            layout=self._layout_digest,
            codec=codec,
            item_bytes=self._item_bytes,
            logical_nbytes=len(buffer),
            payload=room[start : start + nbytes],
            written_s=int(self._clock()),
        )
        room[:start] = header
        end = start + nbytes
        if end < MIN_RECORD:
            room[end:MIN_RECORD] = bytes(MIN_RECORD - end)
            end = MIN_RECORD
        return Record(block.key, block.scope, header, room[:end], len(buffer))

    @contextmanager
    def _transaction(self, slot: ShardSlot) -> Iterator[Writer]:
        """A write transaction that first settles what readers left for it."""
        number = self._slots.index(slot)
        with self._mutex:
            pending, self._pending[number] = self._pending[number], _Pending()
        try:
            with slot.use() as shard, shard.writing() as writer:
                for key in pending.condemned:
                    writer.delete(key)
                for key in pending.used:
                    writer.touch(key, writer.take_sequences(1))
                writer.count_hits(pending.num_hits, pending.hit_bytes)
                if self.settings.idle_ttl_s is not None:
                    writer.expire(int(self._clock()) - self.settings.idle_ttl_s, EXPIRE_AT_ONCE)
                yield writer
        except BaseException:
            with self._mutex:
                self._pending[number].condemned |= pending.condemned
            raise
        with self._mutex:
            self._counts.stored += writer.num_put
            self._counts.written_bytes += writer.written_bytes
            self._counts.evicted += len(writer.evicted)
            self._counts.dropped += writer.evicted

    def _relieve(self, slot: ShardSlot, nbytes: int) -> None:
        """Make room after a full map: pages freed now are free two commits later."""
        try:
            with slot.use() as shard:
                shard.forget_dead_readers()
                shard.learn_slack(nbytes)
            for _ in range(RELIEF_COMMITS):
                with self._transaction(slot) as writer:
                    writer.make_room(nbytes)
        except (*StorageError, ShardDamaged) as error:
            logger.warning(f"disk cache: making room in {slot.path} failed: {error}")

    def _mend(self, slot: ShardSlot, error: Exception) -> bool:
        """Bring back a shard that can no longer be used; whether it is worth trying again."""
        if isinstance(error, ShardDamaged):
            logger.error(f"disk cache: {error}; starting {slot.path} empty")
            return slot.replace(keep_files=False)
        if isinstance(error, Panic):
            return slot.replace(keep_files=True) or slot.replace(keep_files=False)
        return False

    # The rest

    def stats(self) -> TierStats:
        totals, used_bytes = [], 0
        for slot in self._slots:
            try:
                with slot.use() as shard:
                    totals.append(shard.totals)
                    used_bytes += shard.file_bytes()
            except (*StorageError, ShardDamaged):
                continue
        with self._mutex:
            counts = self._counts
            return TierStats(
                name=self.name,
                num_blocks=sum(total.num_blocks for total in totals),
                used_bytes=used_bytes,
                logical_bytes=sum(total.logical_bytes for total in totals),
                capacity_bytes=self.capacity_bytes,
                hits=counts.hits,
                misses=counts.misses,
                stored=counts.stored,
                evicted=counts.evicted,
                read_bytes=counts.read_bytes,
                written_bytes=counts.written_bytes,
                faults=dict(counts.faults),
            )

    def accounts(self) -> dict[PrefixKey, Account]:
        """Blocks and bytes by scope."""
        total: dict[PrefixKey, Account] = {}
        for slot in self._slots:
            with slot.use() as shard:
                for root, account in shard.accounts().items():
                    total[root] = total.get(root, Account()).plus(*account)
        return total

    def days(self) -> dict[int, Day]:
        """Wear by day since 1970 (UTC)."""
        total: dict[int, Day] = {}
        for slot in self._slots:
            with slot.use() as shard:
                for number, day in shard.days().items():
                    total[number] = total.get(number, Day()).plus(day)
        return total

    def close(self) -> None:
        """Flush, note that the folder is at rest, and give it back."""
        if self._closed:
            return
        self.flush()
        num_blocks = self.stats().num_blocks
        whole = not any(slot.damaged for slot in self._slots)
        self._closed = True
        for slot in self._slots:
            slot.close()
        try:
            mark(self.root, clean=whole, num_blocks=num_blocks)
        except OSError as error:
            logger.warning(f"disk cache: {self.root} could not be marked clean: {error}")
        self._dir_lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosed(f"the disk cache in {self.root} is closed")

    def _shard_of(self, key: PrefixKey) -> int:
        return int.from_bytes(key[:4], "little") % len(self._slots)

    def _slot_of(self, key: PrefixKey) -> ShardSlot:
        return self._slots[self._shard_of(key)]

    def _condemn(self, key: PrefixKey, why: MissReason) -> None:
        """A record that cannot be read is deleted by the next write."""
        with self._mutex:
            self._counts.faults[why] += 1
            self._pending[self._shard_of(key)].condemned.add(key)

    def _fault(
        self, why: MissReason, doing: str, error: Exception | None, num_blocks: int = 1
    ) -> None:
        logger.warning(f"disk cache: {doing}: {error or why}")
        with self._mutex:
            self._counts.faults[why] += num_blocks
