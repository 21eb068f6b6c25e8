"""Writes blocks: encodes, makes room, puts, and handles faults of a shard.

Called by the mover's writer thread. Blocks for several shards are encoded and written in parallel,
on a thread per shard, so that one shard's encoding overlaps another's write.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.blocks.part import Part
from tiers.disk.counts import DiskCounts, Pending
from tiers.disk.directory import shard_of
from tiers.disk.format.payload import encode, payload_bound
from tiers.disk.format.record import (
    header_nbytes,
    is_block,
    num_blocks_of,
    pack_header,
    part_of,
    window_key,
)
from tiers.disk.format.rows import Account
from tiers.disk.guard import DiskGuard
from tiers.disk.reader import Scratch
from tiers.disk.room import DiskRoom
from tiers.disk.settings import DiskSettings
from tiers.disk.shard import ShardDamaged
from tiers.disk.slot import ShardSlot
from tiers.disk.storage import MapFull, StorageError
from tiers.disk.transaction import LOOKED_AT, MIN_RECORD, NO_LIMIT, Record, Writer
from tiers.errors import MissReason
from tiers.tier import Age, Cause

logger = logging.getLogger(__name__)

EXPIRE_AT_ONCE = 256
MAX_TRIES = 3
NOW = Age()
RELIEF_COMMITS = 3  # pages freed by the first are reusable after the third
READERS_WAIT_S = 0.5  # readers take less than a millisecond, once they run


class _Fresh(NamedTuple):
    """A block to write, or a part of it, with the times when it was computed and used."""

    block: BlockId
    frame: Frame
    computed_s: int
    used_s: int
    part: Part = Part.WHOLE

    @property
    def key(self) -> PrefixKey:
        """The key of its record."""
        return window_key(self.block.key) if self.part is Part.WINDOW else self.block.key


@dataclass(slots=True)
class _Run:
    """The blocks of one `store` for one shard, and the progress.

    The first transaction takes the sequences for the whole run, so that the head of the run
    outlives its tail although it is written first.
    """

    rows: Sequence[_Fresh]
    done: int = 0
    first: int | None = None  # sequence of the run's last block; None before the first commit
    num_rounds: int = 0  # consecutive transactions that only made room
    num_tries: int = 0  # consecutive faults

    def advance(self, count: int) -> None:
        self.done += count
        self.num_rounds = self.num_tries = 0


class BlockWriter:
    """Writes blocks of one layout into the shards in `slots`."""

    def __init__(
        self,
        slots: Sequence[ShardSlot],
        layout: BlockLayout,
        scratch: Scratch,
        counts: DiskCounts,
        settings: DiskSettings,
        guard: DiskGuard,
        room: DiskRoom,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._slots = slots
        self._room = room
        self._block_bytes = layout.nbytes
        self._item_bytes = layout.torch_dtype.itemsize
        self._layout_digest = layout.digest()
        self._apart = layout.apart
        self._lasting_bytes = layout.lasting_nbytes
        self._split = layout.lasting_nbytes if layout.reach and not layout.apart else None
        self._payload_bound = payload_bound(layout.nbytes, self._split)
        self._scratch = scratch
        self._counts = counts
        self._settings = settings
        self._guard = guard
        self._clock = clock
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"cachesvc-{slot.path.name}") for slot in slots
        ]

    def store(
        self, ids: Sequence[BlockId], frames: Sequence[Frame], ages: Sequence[Age] = ()
    ) -> None:
        """Writes blocks not yet held, with a thread per shard."""
        self._room.fit()
        shares: list[list[_Fresh]] = [[] for _ in self._slots]
        now_s = self._clock()
        for block, frame, age in zip(ids, frames, ages or [NOW] * len(ids), strict=True):
            computed_s, used_s = max(0, now_s - age.computed_s), max(0, now_s - age.used_s)
            row = _Fresh(block, frame, int(computed_s), int(used_s))
            shares[shard_of(block.key, len(self._slots))].append(row)
        work = [(number, share) for number, share in enumerate(shares) if share]
        if len(work) < 2:
            for number, share in work:
                self._store(number, share)
            return
        jobs = [self._threads[row[0]].submit(self._store, *row) for row in work]
        for done in jobs:
            done.result()

    def _store(self, number: int, rows: Sequence[_Fresh]) -> None:
        """Writes blocks of one shard, in batches."""
        if self._apart:
            # All window parts of a run leave before its blocks.
            whole = [row for row in rows if row.frame.part is Part.WHOLE]
            rows = [
                *(row._replace(part=Part.LASTING) for row in rows),
                *(row._replace(part=Part.WINDOW) for row in whole),
            ]
        run = _Run(rows)
        while run.done < len(rows):
            if not self._can_write(number):
                break
            if not self._write(number, run):
                break
        self._refused(rows[run.done :])

    def _refused(self, rows: Iterable[_Fresh]) -> None:
        """Records blocks that are not stored. Without its window part, a block is of use."""
        self._counts.refused(row.key for row in rows if row.part is not Part.WINDOW)

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        """Deletes these blocks, except those to keep. Returns the number held."""
        num_held = 0
        to_delete = [key for key in keys if not self._guard.keeps(key)]
        for number in range(len(self._slots)):
            mine = [key for key in to_delete if shard_of(key, len(self._slots)) == number]
            if not mine or not self._can_write(number):
                continue
            with self._guarded(number, "discarding from"):
                while mine:
                    with self.transaction(number) as writer:
                        num_held += writer.delete_some(mine)
        return num_held

    def flush(self) -> None:
        """Gives room back to the file system if it lacks some, applies readers' pending updates,
        clears dead readers, and makes every commit durable."""
        self._room.fit()
        self.recount()
        for number, slot in enumerate(self._slots):
            if not self._can_write(number):
                continue
            with self._guarded(number, "flushing"):
                with self.transaction(number):
                    pass
                with slot.use() as shard:
                    shard.forget_dead_readers()
                    shard.sync()

    def recount(self) -> None:
        """Passes each scope's use, by the shards' accounts, to the guard."""
        total: dict[PrefixKey, Account] = {}
        for slot in self._slots:
            try:
                with slot.use() as shard:
                    for root, account in shard.accounts().items():
                        total[root] = total.get(root, Account()).plus(*account)
            except (*StorageError, ShardDamaged):
                return  # the next write handles it, and it is recounted after that
        self._guard.recount(total)

    @contextmanager
    def transaction(self, number: int) -> Iterator[Writer]:
        """A write transaction, after readers' pending updates. The updates are applied in the same
        transaction or, if it may change few blocks, in earlier ones."""
        pending = self._counts.take_pending(number)
        part = Pending()
        try:
            more = True
            while more:
                with self._slots[number].use() as shard, shard.writing() as writer:
                    part = pending.split(writer.limit)
                    more = self._settle(writer, part)
                    if not more:
                        yield writer
                part = Pending()
                if writer.fresh:  # on a full disk, commits that store nothing pass
                    self._slots[number].committed()
                stored = sum(num_blocks_of(key) for key, _ in writer.fresh)
                self._counts.wrote(stored, writer.written_bytes, writer.evicted)
        except BaseException as error:
            if isinstance(error, StorageError) and not isinstance(error, MapFull):
                self._slots[number].committed(error)
            self._counts.give_back(number, part)
            self._counts.give_back(number, pending)
            self.recount()
            raise

    def _settle(self, writer: Writer, part: Pending) -> bool:
        """Applies readers' updates. Returns whether the transaction is then at its limit."""
        for key in part.condemned:
            writer.delete(key, Cause.FAULT)
        for key, used_s in part.used.items():
            writer.touch(key, writer.take_sequences(1), used_s)
        writer.lend(list(part.duplicated.items()))
        if self._settings.idle_ttl_s is not None and not writer.spent:
            writer.expire(self._settings.idle_ttl_s, min(EXPIRE_AT_ONCE, writer.limit))
        return writer.limit < NO_LIMIT and writer.changed

    @contextmanager
    def _guarded(self, number: int, doing: str) -> Iterator[None]:
        """Turns an error of the shard into a counted fault, and handles it."""
        try:
            yield
        except (*StorageError, ShardDamaged) as error:
            path = self._slots[number].path
            self._counts.fault(MissReason.IO_ERROR, 1, f"{doing} {path}: {error}")
            self._mend(number, error)

    def _write(self, number: int, run: _Run) -> bool:
        """Runs one transaction of a run. Returns False if no more of it can be written."""
        slot = self._slots[number]
        try:
            with self.transaction(number) as writer:
                first = run.first
                if first is None:
                    first = writer.take_sequences(len(run.rows))
                batch = self._next_batch(run, writer)
                done = self._put(writer, batch, first + len(run.rows) - 1 - run.done)
            run.first = first
        except MapFull:
            return self._relieve(number, run)
        except (*StorageError, ShardDamaged) as error:
            run.num_tries += 1
            if slot.is_full(error) and run.num_tries < MAX_TRIES:
                self._room.fit(failed=True)
                return True
            left = len(run.rows) - run.done
            self._counts.fault(
                MissReason.IO_ERROR, left, f"writing to {slot.path}: {slot.reason(error)}"
            )
            return self._mend(number, error) and run.num_tries < MAX_TRIES
        if done:
            run.advance(len(batch))
            return True
        run.num_rounds += 1
        return run.num_rounds <= LOOKED_AT // writer.limit

    def _next_batch(self, run: _Run, writer: Writer) -> Sequence[_Fresh]:
        nbytes = min(self._settings.batch_bytes, writer.batch_bytes)
        at_once = max(1, nbytes // self._block_bytes)
        return run.rows[run.done : run.done + min(at_once, max(1, writer.limit // 2))]

    def _put(self, writer: Writer, batch: Sequence[_Fresh], last: int) -> bool:
        """Puts blocks that are not held and moves those that are. The head, at `last`, leaves last.
        False if the batch has no room yet but may have it after another transaction."""
        fresh: list[_Fresh] = []
        places: list[int] = []
        for place, row in zip(range(last, 0, -1), batch, strict=False):
            entry = writer.find(row.key)
            if entry is not None and is_block(entry.header, row.block):
                writer.touch(row.key, place, row.used_s)
            elif row.part is not Part.WINDOW or self._lacks_window(writer, row.block, fresh):
                fresh.append(row)
                places.append(place)
        need = sum(self._record_bound(row) for row in fresh)
        if not need:
            return True
        if not self._make_room(writer, need, fresh):
            if writer.spent:
                return False
            self._refused(fresh)
            return True
        for row, place in zip(fresh, places, strict=True):
            # After a collision, the block requested last stays.
            writer.delete(row.key, Cause.REDUNDANT)
            writer.put(self._encode(row), place, row.used_s)
        return True

    def _lacks_window(self, writer: Writer, block: BlockId, fresh: Sequence[_Fresh]) -> bool:
        """Whether a block is held, or is about to be, by a record without its window part."""
        entry = writer.find(block.key)
        if entry is not None and is_block(entry.header, block):
            return part_of(entry.header) is Part.LASTING
        return any(row.block is block for row in fresh)

    def _make_room(self, writer: Writer, need: int, fresh: Sequence[_Fresh]) -> bool:
        """Makes room. These count for their groups already, so among equals they give way."""
        for row in fresh:
            self._guard.moved(row.block.scope, need // len(fresh))
        try:
            return writer.make_room(need)
        finally:
            for row in fresh:
                self._guard.moved(row.block.scope, -(need // len(fresh)))

    def _record_bound(self, row: _Fresh) -> int:
        bound = self._payload_bound
        if row.part is not Part.WHOLE:
            bound = payload_bound(len(self._bytes_of(row)), None)
        return max(MIN_RECORD, self._header_nbytes(row.block) + bound)

    def _bytes_of(self, row: _Fresh) -> memoryview:
        """The bytes of the frame that the record is to have."""
        buffer = row.frame.buffer
        least = self._lasting_bytes if row.part is Part.LASTING else self._block_bytes
        assert len(buffer) in (least, self._block_bytes), f"a frame of {len(buffer)} bytes"
        if row.part is Part.WHOLE:
            return buffer
        first = row.part is Part.LASTING
        return buffer[: self._lasting_bytes] if first else buffer[self._lasting_bytes :]

    def _header_nbytes(self, block: BlockId) -> int:
        return header_nbytes(block, parted=self._split is not None)

    def _encode(self, row: _Fresh) -> Record:
        block, buffer = row.block, self._bytes_of(row)
        room = self._scratch.buffer(self._record_bound(row))
        start = self._header_nbytes(block)
        codec, nbytes, lasting = encode(self._scratch.codec, buffer, room[start:], self._split)
        end = start + nbytes
        header = pack_header(
            block,
            layout=self._layout_digest,
            codec=codec,
            item_bytes=self._item_bytes,
            logical_nbytes=len(buffer),
            payload=room[start:end],
            written_s=int(self._clock()),
            lasting=lasting,
            computed_s=row.computed_s,
            part=row.part,
        )
        room[:start] = header
        if end < MIN_RECORD:
            room[end:MIN_RECORD] = bytes(MIN_RECORD - end)
        return Record(row.key, block.scope, header, room[: max(end, MIN_RECORD)], len(buffer))

    def _relieve(self, number: int, run: _Run) -> bool:
        """Makes room after a full map. Returns whether a retry makes sense."""
        run.num_tries += 1
        path = self._slots[number].path
        nbytes = self._settings.batch_bytes
        try:
            with self._slots[number].use() as shard:
                shard.forget_dead_readers()
                # A reader holds pages freed since it began, so eviction does not help.
                if not shard.wait_for_readers(READERS_WAIT_S):
                    shard.learn_slack(nbytes)
            for _ in range(RELIEF_COMMITS):
                with self.transaction(number) as writer:
                    writer.make_room(min(nbytes, writer.batch_bytes))
        except MapFull:
            logger.debug(f"disk cache: {path} has no room to make room")
        except (*StorageError, ShardDamaged) as error:
            self._counts.fault(MissReason.IO_ERROR, 1, f"making room in {path}: {error}")
            self._mend(number, error)
        if run.num_tries < MAX_TRIES:
            return True
        left = len(run.rows) - run.done
        self._counts.fault(MissReason.NO_ROOM, left, f"{path} has no room")
        return False

    def _mend(self, number: int, error: Exception) -> bool:
        """Recovers an unusable shard. Returns whether a retry makes sense."""
        try:
            return self._slots[number].mend(error)
        except StorageError as worse:
            logger.error(f"disk cache: {self._slots[number].path} cannot be opened: {worse}")
            return False

    def _can_write(self, number: int) -> bool:
        """Whether the shard is open, and not being checked."""
        try:
            return self._slots[number].settle()
        except StorageError as error:
            path = self._slots[number].path
            self._counts.fault(MissReason.IO_ERROR, 1, f"opening {path}: {error}")
            return False
