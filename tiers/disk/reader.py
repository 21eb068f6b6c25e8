"""Lookup and loading of blocks: from the index to verified bytes in a frame. Reader threads.

Everything is verified. The index entry must have the right checksum, identity and layout. The
record at the entry's offset must begin with the same header. The payload must match the header's
checksum. Only then is it decoded into the frame.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.blocks.part import Part
from tiers.disk.counts import DiskCounts
from tiers.disk.directory import shard_of
from tiers.disk.format.codec import Codec, DecodeError
from tiers.disk.format.payload import check, decode, needed_nbytes
from tiers.disk.format.record import Header, is_block, unpack_header, window_key
from tiers.disk.format.rows import IndexEntry
from tiers.disk.recovery.unchecked import UncheckedShard
from tiers.disk.shard import Shard, ShardDamaged
from tiers.disk.slot import ShardSlot
from tiers.disk.storage import PageBuffer, StorageError
from tiers.errors import MissReason
from tiers.tier import Loaded

T = TypeVar("T")


class Scratch(threading.local):
    """A thread's codecs and its memory for one record."""

    def __init__(self, item_bytes: int) -> None:
        self.codec = Codec(item_bytes)
        self._buffer = PageBuffer()

    def buffer(self, nbytes: int) -> memoryview:
        """At least `nbytes`, page-aligned; valid until the next call."""
        return self._buffer.take(nbytes)


class Found(NamedTuple):
    """A record in the index, verified by its entry, and the part of its block to take from it."""

    number: int  # of the shard
    key: PrefixKey
    entry: IndexEntry
    header: Header
    part: Part = Part.WHOLE


def trimmed(found: Found, part: Part) -> Found:
    """The same for this part, with its record cut to the length needed."""
    if found.header.lasting is None:
        return found._replace(part=part)
    place = found.entry.place
    nbytes = len(found.entry.header) + needed_nbytes(found.header, part)
    shorter = place._replace(nbytes=min(place.nbytes, nbytes))
    return found._replace(entry=found.entry._replace(place=shorter), part=part)


class BlockReader:
    """Reads blocks of one layout out of the shards in `slots`."""

    def __init__(
        self, slots: Sequence[ShardSlot], layout: BlockLayout, scratch: Scratch, counts: DiskCounts
    ) -> None:
        self._slots = slots
        self._part_bytes = {part: layout.part_nbytes(part) for part in Part}
        self._block_bytes = layout.nbytes
        self._layout_digest = layout.digest()
        self._scratch = scratch
        self._counts = counts

    def num_held(self, ids: Sequence[BlockId]) -> int:
        """Length of the leading run whose keys are in the index. `load` verifies."""
        entries, _ = self._entries([block.key for block in ids])
        for done, block in enumerate(ids):
            if next(entries[shard_of(block.key, len(self._slots))], None) is None:
                return done
        return len(ids)

    def find(self, ids: Sequence[BlockId]) -> tuple[list[Found], MissReason | None]:
        """The leading run verified by the index, and why it ends early (None: it does not)."""
        entries, broken = self._entries([block.key for block in ids])
        found: list[Found] = []
        for block in ids:
            number = shard_of(block.key, len(self._slots))
            entry = next(entries[number], None)
            if entry is None:
                return found, MissReason.IO_ERROR if number in broken else MissReason.ABSENT
            header = self._prove(entry, block)
            if isinstance(header, MissReason):
                return found, header
            found.append(Found(number, block.key, entry, header))
        return found, None

    def have_windows(self, keys: Sequence[PrefixKey]) -> list[bool]:
        """Whether each of these is held with its window part, by key alone."""
        answers = self._look_up(keys, lambda shard, mine: shard.have_windows(mine))
        return [next(answers[shard_of(key, len(self._slots))], False) for key in keys]

    def records(
        self, ids: Sequence[BlockId], found: Sequence[Found], into: Sequence[Frame]
    ) -> tuple[list[list[Found]], MissReason | None]:
        """The records to read for each of the blocks `found`, as far as they are held: a block's
        own, that of its window part, or both. With the reason why they end early."""
        wanted = [
            window_key(place.key)
            for place, frame in zip(found, into, strict=False)
            if place.header.part is Part.LASTING and frame.part is not Part.LASTING
        ]
        entries, broken = self._entries(wanted) if wanted else ([], set())
        records: list[list[Found]] = []
        for block, place, frame in zip(ids, found, into, strict=False):
            if place.header.part is not Part.LASTING:
                records.append([trimmed(place, frame.part)])
                continue
            own = place._replace(part=Part.LASTING)
            if frame.part is Part.LASTING:
                records.append([own])
                continue
            entry = next(entries[place.number], None)
            if entry is None:
                io_error = place.number in broken
                return records, MissReason.IO_ERROR if io_error else MissReason.ABSENT
            header = self._prove(entry, block)
            if isinstance(header, MissReason):
                return records, header
            window = Found(place.number, window_key(place.key), entry, header, Part.WINDOW)
            records.append([window] if frame.part is Part.WINDOW else [own, window])
        return records, None

    def refuse(self, block: BlockId, why: MissReason) -> None:
        """Counts an entry that `find` rejected, and condemns it if it is damaged."""
        if why in (MissReason.ABSENT, MissReason.IO_ERROR):
            return
        self._counts.fault(why, 1, f"the index entry of block {block.key.hex()} is refused")
        if why not in (MissReason.COLLISION, MissReason.LAYOUT):
            self._counts.condemn(shard_of(block.key, len(self._slots)), block.key)

    def load(self, records: Sequence[Sequence[Found]], into: Sequence[Frame]) -> Loaded:
        """Fills `into[i]` from `records[i]`, and stops at the first that cannot be served. Reads no
        more of each than its entry says; see `trimmed`."""
        self._read_ahead([place for places in records for place in places])
        for done, (places, frame) in enumerate(zip(records, into, strict=True)):
            for place in places:
                why = self._fill(place, frame.buffer)
                if why is not None:
                    return Loaded(done, self._blame(place, why))
        return Loaded(len(records), None)

    def _entries(self, wanted: Sequence[PrefixKey]) -> tuple[list[Iterator[IndexEntry]], set[int]]:
        """Each shard's run of entries, and the shards that failed."""
        broken: set[int] = set()
        return self._look_up(wanted, lambda shard, mine: shard.find(mine), broken), broken

    def _look_up(
        self,
        wanted: Sequence[PrefixKey],
        look: Callable[[Shard | UncheckedShard, list[PrefixKey]], Iterable[T]],
        broken: set[int] | None = None,
    ) -> list[Iterator[T]]:
        """What each shard answers about its keys: nothing if it failed, and then it is `broken`."""
        keys: list[list[PrefixKey]] = [[] for _ in self._slots]
        for key in wanted:
            keys[shard_of(key, len(self._slots))].append(key)
        answers: list[Iterator[T]] = []
        for number, (slot, mine) in enumerate(zip(self._slots, keys, strict=True)):
            answer: Iterable[T] = ()
            try:
                if mine:
                    with slot.read() as shard:
                        answer = look(shard, mine)
            except (*StorageError, ShardDamaged) as error:
                if broken is not None:
                    broken.add(number)
                self._counts.fault(MissReason.IO_ERROR, 1, f"looking up in {slot.path}: {error}")
            answers.append(iter(answer))
        return answers

    def _prove(self, entry: IndexEntry, block: BlockId) -> Header | MissReason:
        header = unpack_header(entry.header)
        if isinstance(header, MissReason):
            return header
        if not is_block(entry.header, block):
            return MissReason.COLLISION
        nbytes = self._part_bytes[header.part]
        if header.layout != self._layout_digest or header.logical_nbytes != nbytes:
            return MissReason.LAYOUT
        return header

    def _read_ahead(self, found: Sequence[Found]) -> None:
        """Requests the whole run at once, to be read while the first blocks are decoded."""
        if len(found) < 2:
            return
        for number, slot in enumerate(self._slots):
            entries = [place.entry for place in found if place.number == number]
            try:
                with slot.read() as shard:
                    shard.will_need(entries)
            except (*StorageError, ShardDamaged):
                return  # only a hint; the read itself will report errors

    def _fill(self, found: Found, into: memoryview) -> MissReason | None:
        if len(into) not in (self._block_bytes, self._part_bytes[found.part]):
            return MissReason.LAYOUT
        slot, entry, header = self._slots[found.number], found.entry, found.header
        try:
            with slot.read() as shard:
                buffer = self._scratch.buffer(shard.room_for(entry))
                record = shard.read(found.key, entry, buffer)
        except (*StorageError, ShardDamaged) as error:
            self._counts.fault(MissReason.IO_ERROR, 1, f"reading a block of {slot.path}: {error}")
            return MissReason.IO_ERROR
        return self._verify(entry, header, record, into, found.part)

    def _verify(
        self, entry: IndexEntry, header: Header, record: memoryview, into: memoryview, part: Part
    ) -> MissReason | None:
        start = len(entry.header)
        nbytes = needed_nbytes(header, part)
        if len(record) < start + nbytes:
            return MissReason.TORN
        if record[:start] != entry.header:
            stands = unpack_header(record)
            return stands if isinstance(stands, MissReason) else MissReason.CHECKSUM
        payload = record[start : start + nbytes]
        why = check(header, payload, part)
        if why is None:
            try:
                decode(self._scratch.codec, header, payload, into, part)
            except DecodeError:
                return MissReason.DECODE
        return why

    def _blame(self, found: Found, why: MissReason) -> MissReason:
        """ABSENT if the block was evicted while it was read. Otherwise counts and condemns it."""
        if why in (MissReason.IO_ERROR, MissReason.LAYOUT):
            return why
        slot = self._slots[found.number]
        try:
            with slot.read() as shard:
                now = shard.find([found.key])
        except (*StorageError, ShardDamaged):
            now = []
        if not now or now[0].place.offset != found.entry.place.offset:
            return MissReason.ABSENT
        self._counts.fault(why, 1, f"block {found.key.hex()} in {slot.path} is not as written")
        self._counts.condemn(found.number, found.key)
        return why
