"""Reads every block of a shard like a hit and reports errors. Safe beside a running server.

Called by `cachesvc cache verify`, in the pages of `inspection.maintenance`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tiers.blocks.keys import PrefixKey, child_key
from tiers.disk.format.codec import Codec, DecodeError
from tiers.disk.format.payload import decode
from tiers.disk.format.record import Header, check_payload, num_blocks_of, record_key, unpack_header
from tiers.disk.format.rows import IndexEntry
from tiers.disk.inspection.maintenance import delete, pages
from tiers.disk.shard import Shard
from tiers.disk.storage import PageBuffer, StorageError
from tiers.errors import MissReason


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a verification. `structure` says how the databases disagree, if they do."""

    num_blocks: int = 0
    logical_bytes: int = 0
    bad: Mapping[MissReason, int] = field(default_factory=dict)
    num_repaired: int = 0
    structure: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        return not self.bad and not self.structure

    def plus(self, other: "Verified") -> "Verified":
        return Verified(
            self.num_blocks + other.num_blocks,
            self.logical_bytes + other.logical_bytes,
            dict(Counter(self.bad) + Counter(other.bad)),
            self.num_repaired + other.num_repaired,
            self.structure + other.structure,
        )


def verify_all(
    shards: Iterable[Shard],
    *,
    repair: bool = False,
    advance: Callable[[int], None] = lambda num_blocks: None,
) -> Verified:
    total = Verified()
    for shard in shards:
        total = total.plus(verify(shard, repair=repair, advance=advance))
    return total


def verify(
    shard: Shard, *, repair: bool = False, advance: Callable[[int], None] = lambda num_blocks: None
) -> Verified:
    """Reads every block like a hit, and recomputes its key. `repair` deletes bad blocks.

    `advance` is called with the number of blocks checked since its last call.

    A block evicted meanwhile is neither good nor bad.
    """
    checker = _Checker(shard)
    bad: Counter[MissReason] = Counter()
    num_blocks = logical_bytes = num_repaired = 0
    for rows in pages(shard):
        shard.will_need([entry for _, entry in rows])
        to_delete = []
        for key, entry in rows:
            why = checker.check(key, entry)
            if why is None:
                num_blocks += num_blocks_of(key)
                logical_bytes += entry.logical_nbytes
            elif _still_there(shard, key, entry):
                bad[why] += 1
                to_delete.append(key)
        advance(len(rows))
        if repair:
            num_repaired += delete(shard, to_delete)
    problem = shard.walk()
    structure = (f"{shard.path.name}: {problem}",) if problem else ()
    return Verified(num_blocks, logical_bytes, dict(bad), num_repaired, structure)


def _still_there(shard: Shard, key: PrefixKey, entry: IndexEntry) -> bool:
    now = shard.find([key])
    return bool(now) and now[0].place.offset == entry.place.offset


class _Checker:
    """Checks records of one shard; holds the memory to do it in."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._codec = Codec(1)
        self._record = PageBuffer()
        self._block = PageBuffer()

    def check(self, key: PrefixKey, entry: IndexEntry) -> MissReason | None:
        header = unpack_header(entry.header)
        if isinstance(header, MissReason):
            return header
        named = child_key(header.parent, header.tokens, header.content)
        if record_key(header) != key or header.key != named:
            return MissReason.COLLISION
        try:
            buffer = self._record.take(self._shard.room_for(entry))
            record = self._shard.read(key, entry, buffer)
        except StorageError:
            return MissReason.IO_ERROR
        return self._check_record(entry, header, record)

    def _check_record(
        self, entry: IndexEntry, header: Header, record: memoryview
    ) -> MissReason | None:
        start = len(entry.header)
        end = start + header.payload_nbytes
        if len(record) < end:
            return MissReason.TORN
        if record[:start] != entry.header:
            return MissReason.CHECKSUM
        why = check_payload(header, record[start:end])
        if why is not None:
            return why
        block = self._block.take(header.logical_nbytes)[: header.logical_nbytes]
        try:
            decode(self._codec, header, record[start:end], block)
        except DecodeError:
            return MissReason.DECODE
        return None
