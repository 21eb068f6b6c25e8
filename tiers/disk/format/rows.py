"""The small values beside a shard's records, and their encoding: fixed size, little-endian."""

import struct
from typing import NamedTuple

from tiers.blocks.keys import KEY_BYTES, PrefixKey
from tiers.disk.format.record import logical_nbytes_of, scope_of


class Place(NamedTuple):
    """A record's position and its place in the order of eviction."""

    sequence: int  # its position in the order of eviction
    offset: int  # of the record in data.mdb; 0 if it has no run of pages of its own
    nbytes: int
    used_s: int


class IndexEntry(NamedTuple):
    """A block's index entry: its place and a copy of the record's header."""

    place: Place
    header: bytes

    def pack(self) -> bytes:
        return _PLACE.pack(*self.place) + self.header

    @classmethod
    def unpack(cls, data: bytes) -> "IndexEntry":
        return cls(Place(*_PLACE.unpack_from(data)), data[_PLACE.size :])

    @property
    def scope(self) -> PrefixKey:
        return scope_of(self.header)

    @property
    def logical_nbytes(self) -> int:
        return logical_nbytes_of(self.header)


class Totals(NamedTuple):
    """One shard's counts. The first three are current."""

    num_blocks: int = 0
    stored_bytes: int = 0  # in whole pages
    logical_bytes: int = 0
    next_sequence: int = 1
    num_stored: int = 0
    num_evicted: int = 0
    written_bytes: int = 0

    def pack(self) -> bytes:
        return _TOTALS.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | None) -> "Totals":
        return cls(*_TOTALS.unpack(data)) if data else cls()


class Account(NamedTuple):
    """One scope's current use of a shard."""

    num_blocks: int = 0
    stored_bytes: int = 0
    logical_bytes: int = 0

    def pack(self) -> bytes:
        return _ACCOUNT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | None) -> "Account":
        return cls(*_ACCOUNT.unpack(data)) if data else cls()

    def plus(self, blocks: int, stored_bytes: int, logical_bytes: int) -> "Account":
        """The changed account, never negative: damage must not make it unwritable."""
        return Account(
            max(0, self.num_blocks + blocks),
            max(0, self.stored_bytes + stored_bytes),
            max(0, self.logical_bytes + logical_bytes),
        )


_PLACE = struct.Struct("<QQII")
_TOTALS = struct.Struct("<7Q")
_ACCOUNT = struct.Struct("<3Q")
_SEQUENCE = struct.Struct(">Q")
_USED = struct.Struct("<I")


def pack_sequence(sequence: int) -> bytes:
    """Packs a sequence big-endian, so that LMDB's byte order is the order of eviction."""
    return _SEQUENCE.pack(sequence)


def unpack_sequence(data: bytes) -> int:
    return int(_SEQUENCE.unpack(data)[0])


def pack_order(key: PrefixKey, used_s: int) -> bytes:
    return key + _USED.pack(used_s)


def unpack_order(data: bytes) -> tuple[PrefixKey, int]:
    key = bytes(data[: -_USED.size])
    if len(key) not in (KEY_BYTES, KEY_BYTES + 1):  # a block's, or that of its window part
        raise struct.error(f"a row of {len(data)} bytes")
    return PrefixKey(key), int(_USED.unpack(data[-_USED.size :])[0])
