"""Moves blocks between machines: an export is a stream of records, and an import verifies each.

A stream is "cachesvc-blocks\\n", then per block a u32 length and the record as on disk (header and
payload), oldest first. A window part may have a record of its own. A length of 0, the number of
records (u64) and xxh3_64 of that number end it.
An importer trusts nothing: every header, payload and key is checked again. If a stream ends early,
the complete blocks are kept.
"""

import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import xxhash

from tiers.blocks.keys import PrefixKey, child_key
from tiers.disk.format.codec import CodecId
from tiers.disk.format.record import (
    Header,
    block_key,
    check_payload,
    is_window,
    num_blocks_of,
    parent_of,
    record_key,
    unpack_header,
)
from tiers.disk.format.rows import IndexEntry
from tiers.disk.inspection.maintenance import pages_by_age
from tiers.disk.shard import Shard
from tiers.disk.storage import MapFull, PageBuffer
from tiers.disk.transaction import MIN_RECORD, Record
from tiers.errors import MissReason

MAGIC = b"cachesvc-blocks\n"
BATCH_BYTES = 8 << 20
MAX_RECORD = 1 << 30
MAX_ROUNDS = 512  # transactions of one batch
MAX_FULL = 8  # of them that found the map full
READERS_WAIT_S = 1.0
_LENGTH = struct.Struct("<I")
_END = struct.Struct("<QQ")

Rule = Callable[[PrefixKey, IndexEntry], bool]


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of an export or import. `complete` is False if a stream ended early."""

    num_blocks: int = 0
    nbytes: int = 0
    num_held: int = 0  # blocks already present
    num_refused: int = 0  # blocks without room
    bad: Mapping[MissReason, int] = field(default_factory=dict)
    complete: bool = True


def chain_rule(shards: Sequence[Shard], keys: Collection[PrefixKey]) -> Rule:
    """A rule for whole prefixes: the blocks `keys`, their continuations and their predecessors.

    Reads every index entry once, and holds the keys of all blocks meanwhile.
    """
    parents: dict[PrefixKey, PrefixKey] = {}
    children: dict[PrefixKey, list[PrefixKey]] = {}
    for shard in shards:
        for rows in pages_by_age(shard):
            for key, entry in rows:
                if is_window(key):
                    continue
                parents[key] = parent_of(entry.header)
                children.setdefault(parents[key], []).append(key)
    chosen: set[PrefixKey] = set()
    for key in keys:
        while key in parents:
            chosen.add(key)
            key = parents[key]
    below = list(keys)
    while below:
        key = below.pop()
        chosen.add(key)
        below += children.get(key, [])
    return lambda key, _: block_key(key) in chosen


def export(shards: Sequence[Shard], to: BinaryIO, rule: Rule) -> Moved:
    """Writes the blocks selected by `rule` to a stream, each checked. Safe beside a running
    server."""
    to.write(MAGIC)
    num_records = num_blocks = nbytes = 0
    bad: Counter[MissReason] = Counter()
    for shard in shards:
        for key, record in _records(shard, rule):
            found = proven(record, key)
            if isinstance(found, MissReason):
                bad[found] += 1
                continue
            whole = record[: whole_nbytes(record, found)]
            to.write(_LENGTH.pack(len(whole)))
            to.write(whole)
            num_records += 1
            num_blocks += num_blocks_of(key)
            nbytes += len(whole)
    to.write(_LENGTH.pack(0) + _end(num_records))
    return Moved(num_blocks, nbytes, bad=dict(bad))


def import_blocks(
    shards: Sequence[Shard], source: BinaryIO, shard_of: Callable[[PrefixKey, int], int]
) -> Moved:
    """Stores the blocks of a stream, evicting like a server. Safe beside a running one.

    Raises ValueError for a stream that is not an export.
    """
    if source.read(len(MAGIC)) != MAGIC:
        raise ValueError("this is not an export of cachesvc blocks")
    importer = _Importer(shards, shard_of)
    complete = False
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if length == 0:
            end = source.read(_END.size)
            complete = end == _end(importer.num_seen)
            break
        if length > MAX_RECORD or len(record := source.read(length)) < length:
            break
        importer.take(record)
    return importer.finish(complete=complete)


class _Importer:
    """Collects verified records into batches, one transaction each."""

    def __init__(self, shards: Sequence[Shard], shard_of: Callable[[PrefixKey, int], int]) -> None:
        self._shards = shards
        self._shard_of = shard_of
        self._batches: list[list[Record]] = [[] for _ in shards]
        self._bad: Counter[MissReason] = Counter()
        self._num_stored = self._num_held = self._num_refused = self._nbytes = 0
        self.num_seen = 0

    def take(self, data: bytes) -> None:
        self.num_seen += 1
        header = proven(memoryview(data), None)
        if isinstance(header, MissReason):
            self._bad[header] += 1
            return
        number = self._shard_of(header.key, len(self._shards))
        batch = self._batches[number]
        batch.append(make_record(data, header))
        if sum(len(record.data) for record in batch) >= self._batch_bytes(number):
            self._write(number)

    def finish(self, *, complete: bool) -> Moved:
        for number in range(len(self._shards)):
            self._write(number)
            self._shards[number].sync()
        return Moved(
            num_blocks=self._num_stored,
            nbytes=self._nbytes,
            num_held=self._num_held,
            num_refused=self._num_refused,
            bad=dict(self._bad),
            complete=complete,
        )

    def _batch_bytes(self, number: int) -> int:
        return min(BATCH_BYTES, self._shards[number].map_bytes // 32)

    def _write(self, number: int) -> None:
        batch, self._batches[number] = self._batches[number], []
        shard = self._shards[number]
        num_full = 0
        for _ in range(MAX_ROUNDS):
            if not batch or num_full == MAX_FULL:
                break
            try:
                self._write_part(shard, batch)
            except MapFull:  # a reader keeps pages that were freed since it began
                num_full += 1
                shard.forget_dead_readers()
                shard.wait_for_readers(READERS_WAIT_S)
                shard.learn_slack(self._batch_bytes(number))
        self._num_refused += sum(num_blocks_of(record.key) for record in batch)

    def _write_part(self, shard: Shard, batch: list[Record]) -> None:
        """One transaction; takes from the batch what it stored, found or had no room for."""
        with shard.writing() as writer:
            part = batch[: max(1, writer.limit // 2)]
            fresh = [record for record in part if writer.find(record.key) is None]
            room = writer.make_room(sum(len(record.data) for record in fresh))
            again = not room and writer.spent
            if room:
                for sequence, record in enumerate(fresh, start=writer.take_sequences(len(fresh))):
                    writer.put(record, sequence, writer.now_s)
        if again:
            return
        del batch[: len(part)]
        num_fresh = sum(num_blocks_of(record.key) for record in fresh)
        self._num_held += sum(num_blocks_of(record.key) for record in part) - num_fresh
        if room:
            self._num_stored += num_fresh
            self._nbytes += sum(len(record.data) for record in fresh)
        else:
            self._num_refused += num_fresh


def _records(shard: Shard, rule: Rule) -> Iterator[tuple[PrefixKey, memoryview]]:
    for rows in pages_by_age(shard):
        chosen = [(key, entry) for key, entry in rows if rule(key, entry)]
        shard.will_need([entry for _, entry in chosen])
        for key, entry in chosen:
            yield key, read_record(shard, key, entry)


def read_record(shard: Shard, key: PrefixKey, entry: IndexEntry) -> memoryview:
    return shard.read(key, entry, PageBuffer().take(shard.room_for(entry)))


def proven(record: memoryview, key: PrefixKey | None) -> Header | MissReason:
    """The record's header if header, payload and key are valid, else the reason."""
    header = unpack_header(record)
    if isinstance(header, MissReason):
        return header
    if key is not None and record_key(header) != key:
        return MissReason.ABSENT
    if child_key(header.parent, header.tokens, header.content) != header.key:
        return MissReason.COLLISION
    if header.codec not in tuple(CodecId):
        return MissReason.VERSION
    start = _header_nbytes(record)
    return check_payload(header, record[start : start + header.payload_nbytes]) or header


def _header_nbytes(record: memoryview | bytes) -> int:
    return int.from_bytes(record[12:16], "little")


def whole_nbytes(record: memoryview, header: Header) -> int:
    """Length of a record without the zeros that fill its page."""
    return _header_nbytes(record) + header.payload_nbytes


def _end(num_records: int) -> bytes:
    return _END.pack(num_records, xxhash.xxh3_64_intdigest(num_records.to_bytes(8, "little")))


def make_record(data: bytes, header: Header) -> Record:
    start = _header_nbytes(data)
    whole = data.ljust(MIN_RECORD, b"\0")
    key = record_key(header)
    return Record(key, header.scope, data[:start], memoryview(whole), header.logical_nbytes)
