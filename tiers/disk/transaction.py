"""What happens inside one write transaction of a shard: put, delete, touch, make room, account.

Created by `Shard.writing`, and used only by its thread during the transaction.

Room is counted in pages. A page freed by a transaction is reusable only two commits later, and LMDB
copies changed pages, so a reserve of the map's pages must stay unused:

    |<-------------------------- pages of the map -------------------------->|
    | in use: branch, leaf and overflow pages of every database |  reserve    |
                                                                 3 x the batch (freed by this and
                                                                 the last commits) + 1/32 of the map
                                                                 (no run of that length) + 64

Each block that is put, moved or deleted also changes index pages. On a small disk with small blocks
these could exceed the reserve, so one transaction changes few blocks there (`change_limit`), and
larger work continues in the next.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from tiers.blocks.keys import PrefixKey
from tiers.blocks.part import Part
from tiers.disk.clock import IdleClock
from tiers.disk.format.record import is_window, num_blocks_of, part_of, window_key
from tiers.disk.format.rows import (
    Account,
    IndexEntry,
    Place,
    Totals,
    pack_order,
    pack_sequence,
    unpack_order,
    unpack_sequence,
)
from tiers.disk.guard import DiskGuard
from tiers.disk.recovery.page import HEADER, PAGE, Torn
from tiers.disk.recovery.vet import PageVet
from tiers.disk.storage import Database, MapFull, Storage, Transaction
from tiers.tier import Cause

PAGE_HEADER = 16  # LMDB 0.9, struct MDB_page: number u64, pad u16, flags u16, pages in the run u32
MIN_RECORD = 4096 - PAGE_HEADER  # a shorter value could share a leaf page and have no run of pages
LOOKED_AT = 2048  # spared blocks after which a transaction gives up: about 30 ms
_PAGE = struct.Struct("<QHHI")
_OVERFLOW = 0x04
BATCHES_IN_FILE = 32  # a transaction writes at most this part of what the file may take
_BATCHES = 3
_FRAGMENTS = 32
_FEW_PAGES = 64
_CHANGED = 3  # pages per block put, moved or deleted: a leaf of data, index and order
_FEW_CHANGES = 8
NO_LIMIT = 1 << 30


class Databases(NamedTuple):
    """The named databases of a shard."""

    data: Database
    index: Database
    order: Database
    scopes: Database
    state: Database


class Record(NamedTuple):
    """What to write. `data` is header and payload, MIN_RECORD bytes or more."""

    key: PrefixKey
    scope: PrefixKey
    header: bytes
    data: memoryview
    logical_nbytes: int


class Gone(NamedTuple):
    """A block, or a window part, that this transaction removed."""

    key: PrefixKey
    entry: IndexEntry
    cause: Cause


def reserve_pages(map_pages: int, batch_pages: int) -> int:
    """The pages to keep free so that a batch of this size has room at once."""
    return _BATCHES * batch_pages + map_pages // _FRAGMENTS + _FEW_PAGES


def change_limit(map_pages: int, index_pages: int) -> int:
    """The number of blocks one transaction may change, so that its index pages have room."""
    room = (map_pages // _FRAGMENTS + _FEW_PAGES) // _BATCHES
    return NO_LIMIT if index_pages <= room else max(_FEW_CHANGES, room // _CHANGED)


class Writer:
    """An open write transaction. `finish` writes totals and accounts once."""

    def __init__(
        self,
        storage: Storage,
        txn: Transaction,
        dbs: Databases,
        *,
        page_bytes: int,
        room_pages: int,
        end_bytes: int | None = None,
        now_s: int,
        vet: PageVet,
        found: IdleClock | None = None,
        guard: DiskGuard | None = None,
        before_free: Callable[[int, int], None] = lambda offset, nbytes: None,
    ) -> None:
        self._before_free = before_free
        self._vet = vet
        self._found = found or IdleClock()
        self._storage = storage
        self._txn = txn
        self._dbs = dbs
        self._page_bytes = page_bytes
        self._room_pages = room_pages
        self._end_bytes = end_bytes  # of the file, which is not to grow beyond
        self._guard = guard
        self.totals = Totals.unpack(self._get("state", b"totals"))
        self._accounts: dict[PrefixKey, Account] = {}
        self.written_bytes = 0
        self.fresh: list[tuple[PrefixKey, IndexEntry]] = []
        self.gone: list[Gone] = []
        self.evicted: list[PrefixKey] = []
        self.now_s = now_s
        self.limit = change_limit(room_pages, self._pages_in_use("branch_pages", "leaf_pages"))
        self.batch_bytes = room_pages * page_bytes // BATCHES_IN_FILE
        self._num_changes = 0

    @property
    def spent(self) -> bool:
        """Whether this transaction has reached its limit of changed blocks."""
        return self._num_changes >= self.limit

    @property
    def changed(self) -> bool:
        return self._num_changes > 0

    def find(self, key: PrefixKey) -> IndexEntry | None:
        data = self._get("index", key)
        return None if data is None else IndexEntry.unpack(data)

    def take_sequences(self, count: int) -> int:
        """The first of `count` new sequences at the recent end of the order."""
        first = self.totals.next_sequence
        self.totals = self.totals._replace(next_sequence=first + count)
        return first

    def put(self, record: Record, sequence: int, used_s: int) -> None:
        """Writes a block that is not held. The caller has made room and taken the sequence."""
        self._num_changes += 1
        self._put("data", record.key, record.data)
        offset = self._extent(record)
        if self._end_bytes is not None and offset + len(record.data) > self._end_bytes:
            raise MapFull("the file would grow beyond what it may take")
        place = Place(sequence, offset, len(record.data), used_s)
        entry = IndexEntry(place, record.header)
        self._place(record.key, entry)
        stored = self._pages(len(record.data)) * self._page_bytes
        count = num_blocks_of(record.key)
        self._account(record.scope, count, stored, record.logical_nbytes)
        totals = self.totals
        self.totals = totals._replace(
            num_stored=totals.num_stored + count, written_bytes=totals.written_bytes + stored
        )
        self.written_bytes += stored
        self.fresh.append((record.key, entry))

    def touch(self, key: PrefixKey, sequence: int, used_s: int = 0) -> bool:
        """Moves a held block to `sequence` in the order of eviction. `used_s` 0: as before."""
        entry = self.find(key)
        if entry is None:
            return False
        self._num_changes += 1
        self._delete("order", pack_sequence(entry.place.sequence))
        place = entry.place._replace(sequence=sequence, used_s=used_s or entry.place.used_s)
        self._place(key, entry._replace(place=place))
        return True

    def delete(self, key: PrefixKey, cause: Cause = Cause.REQUEST) -> bool:
        """Deletes a block with its window part, or the latter alone, if it is held."""
        entry = self.find(key)
        if entry is None:
            return False
        if part_of(entry.header) is Part.LASTING and not is_window(key):
            self.delete(window_key(key), cause)
        self._num_changes += 1
        self._check_run(key, entry.place)
        self._before_free(entry.place.offset, entry.place.nbytes)
        self._delete("data", key)
        self._delete("index", key)
        self._delete("order", pack_sequence(entry.place.sequence))
        stored = self._pages(entry.place.nbytes) * self._page_bytes
        self._account(entry.scope, -num_blocks_of(key), -stored, -entry.logical_nbytes)
        self.gone.append(Gone(key, entry, cause))
        return True

    def delete_some(self, keys: list[PrefixKey]) -> int:
        """Deletes as many of these as this transaction may, and removes them from the list. Returns
        the number held."""
        num_held = 0
        while keys and not self.spent:
            key = keys.pop()
            num_held += self.delete(key) and not is_window(key)
        return num_held

    def lend(self, uses: Sequence[tuple[PrefixKey, int]]) -> None:
        """Makes held blocks the first to leave, the last of them first. If the old end has no
        sequences left before it, they stay where they are."""
        if not uses:
            return
        first = next((sequence for sequence, _, _ in self._rows()), 1)
        for sequence, (key, used_s) in zip(range(first - 1, 0, -1), uses, strict=False):
            self.touch(key, sequence, used_s)

    def make_room(self, nbytes: int, *, spare: bool = True) -> bool:
        """Evicts from the old end until a batch of `nbytes` fits. Without `spare`, also what is
        pinned or within a quota.

        False if too much is spared, or more must be evicted than this transaction may change
        (`spent`).
        """
        excess = self._excess_pages(nbytes)
        guard, num_spared, at_once = self._guard if spare else None, 0, min(64, self.limit)
        while excess > 0 and num_spared < LOOKED_AT and not self.spent:
            rows = list(islice(self._rows(), at_once))
            if not rows:
                break
            spared: list[PrefixKey] = []
            for _, key, _ in rows:
                entry = self.find(key)
                if entry is None or (guard is not None and guard.spares(key, entry.scope)):
                    spared.append(key)
                    continue
                borrowed = guard is not None and guard.is_over(entry.scope)
                before = len(self.gone)
                self._evict([key], Cause.QUOTA if borrowed else Cause.ROOM)
                excess -= sum(self._pages(e.place.nbytes) for _, e, _ in self.gone[before:])
                if excess <= 0:
                    break
            self._move_back(spared)
            num_spared += len(spared)
        return excess <= 0

    def expire(self, idle_s: int, limit: int) -> None:
        """Evicts blocks unused for `idle_s` among the `limit` oldest. Skips pinned blocks."""
        guard, gone = self._guard, list[PrefixKey]()
        for sequence, key, used_s in islice(self._rows(), LOOKED_AT):
            if guard is not None and guard.keeps(key):
                continue
            if used_s < self._found.now_s(sequence, self.now_s) - idle_s:
                gone.append(key)
            limit -= 1
            if not limit:
                break
        self._evict(gone, Cause.AGE)

    def _move_back(self, keys: Sequence[PrefixKey]) -> None:
        """Moves blocks to the recent end, in their order, out of the way of eviction."""
        for sequence, key in enumerate(keys, start=self.take_sequences(len(keys))):
            self.touch(key, sequence)

    def finish(self) -> None:
        """Writes the accounts changed by this transaction."""
        self._put("state", b"totals", self.totals.pack())
        for root, account in self._accounts.items():
            if account.num_blocks or account.stored_bytes:
                self._put("scopes", root, account.pack())
            else:
                self._delete("scopes", root)

    def _place(self, key: PrefixKey, entry: IndexEntry) -> None:
        self._put("index", key, entry.pack())
        order = pack_order(key, entry.place.used_s)
        self._put("order", pack_sequence(entry.place.sequence), order)

    def _evict(self, keys: list[PrefixKey], cause: Cause) -> None:
        gone = [key for key in keys if self.delete(key, cause) and not is_window(key)]
        self.totals = self.totals._replace(num_evicted=self.totals.num_evicted + len(gone))
        self.evicted += gone

    def _rows(self) -> Iterator[tuple[int, PrefixKey, int]]:
        """Sequence, key and last use of each block, from the old end."""
        known = b""
        self._vet.way("order", known, beside=True)
        with self._txn.cursor(db=self._dbs.order) as cursor:
            for row, data in cursor.iternext(keys=True, values=True):
                place = bytes(row)
                if place > known:
                    leaf = self._vet.way("order", place, beside=True)
                    known = max(place, self._vet.last_key(leaf) if leaf else b"")
                yield unpack_sequence(place), *unpack_order(data)

    def _get(self, name: str, key: bytes) -> bytes | None:
        self._vet.way(name, key)
        return self._storage.get(self._txn, key, getattr(self._dbs, name))

    def _put(self, name: str, key: bytes, value: object) -> None:
        self._vet.way(name, key)
        self._storage.put(self._txn, key, value, getattr(self._dbs, name))

    def _delete(self, name: str, key: bytes) -> None:
        self._vet.way(name, key, beside=True)
        self._storage.delete(self._txn, key, getattr(self._dbs, name))

    def _check_run(self, key: PrefixKey, place: Place) -> None:
        """Raises Torn if the record is elsewhere: LMDB would free another's pages."""
        leaf = self._vet.way("data", key, beside=True)
        node = self._vet.node(leaf, key) if leaf is not None else None
        if node is None or not place.offset or place.offset == node.run * PAGE + HEADER:
            return
        if all(key != fresh for fresh, _ in self.fresh):
            raise Torn(f"the record of {key.hex()} is at page {node.run}, not at {place.offset}")

    def _account(self, scope: PrefixKey, blocks: int, stored: int, logical: int) -> None:
        account = self._accounts.get(scope)
        if account is None:
            account = Account.unpack(self._get("scopes", scope))
        self._accounts[scope] = account.plus(blocks, stored, logical)
        if self._guard is not None:
            self._guard.moved(scope, stored)
        now = Account(*self.totals[:3]).plus(blocks, stored, logical)
        self.totals = self.totals._replace(**now._asdict())

    def _excess_pages(self, nbytes: int) -> int:
        batch = self._pages(nbytes)
        room = self._room_pages - reserve_pages(self._room_pages, batch) - batch
        return self._pages_in_use("branch_pages", "leaf_pages", "overflow_pages") - room

    def _pages(self, nbytes: int) -> int:
        return -(-(nbytes + PAGE_HEADER) // self._page_bytes)

    def _pages_in_use(self, *kinds: str) -> int:
        stats = [self._txn.stat(db) for db in self._dbs]
        return sum(stat[kind] for stat in stats for kind in kinds)

    def _extent(self, record: Record) -> int:
        """File offset of the record just put, or 0 if it has no run of pages of its own.

        LMDB returns the value in its page, after the page header with the page's number. Flags and
        run length are checked, so with another LMDB's layout only the shortcut would be lost.
        """
        import numpy as np  # here, since a command that only counts blocks needs none

        value = self._storage.view(self._txn, record.key, self._dbs.data)
        address = np.frombuffer(value, np.uint8).ctypes.data - PAGE_HEADER
        number, _, flags, pages = _PAGE.unpack(ctypes.string_at(address, _PAGE.size))
        if not flags & _OVERFLOW or pages != self._pages(len(value)):
            return 0
        return int(number) * self._page_bytes + PAGE_HEADER
