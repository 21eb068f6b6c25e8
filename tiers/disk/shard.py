"""One LMDB environment of the disk tier: records, their order of eviction, and their accounts.

Databases, all written in the record's transaction, so that they always agree:

    data    key -> record (header, payload)         each one run of overflow pages
    index   key -> Place, header                    a lookup never touches the payload
    order   sequence -> key, time of last use       the first entry is evicted first
    scopes  scope root -> Account                   blocks and bytes of one scope
    state   "totals" -> Totals

A payload is read by its file offset, not through the map. py-lmdb touches every page of a value
before returning it, with a 4 KiB read each on a cold cache, and on a file descriptor a bad sector
is an error code rather than a signal. The offset comes from LMDB's page header before the value. It
is valid until the block is deleted and is never trusted: the record there must have exactly the
header in the index.

No memory is used per block. Thread-safe; LMDB admits one write transaction at a time over all
processes. Errors of LMDB and the system are raised unchanged; `DiskTier` turns them into misses.
"""

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from tiers.blocks.keys import PrefixKey
from tiers.disk.clock import IdleClock
from tiers.disk.format.record import is_window
from tiers.disk.format.rows import (
    Account,
    IndexEntry,
    Totals,
    pack_order,
    pack_sequence,
    unpack_order,
)
from tiers.disk.guard import DiskGuard
from tiers.disk.recovery.consistency import Fixes
from tiers.disk.recovery.page import Torn, is_run_head, run_head
from tiers.disk.recovery.pages import PageFile, free_spans
from tiers.disk.recovery.snapshot import Snapshot
from tiers.disk.recovery.vet import PageVet
from tiers.disk.storage import Database, DataFile, Storage
from tiers.disk.transaction import PAGE_HEADER, Databases, Writer
from tiers.errors import TierError

SYNC_BYTES = 64 << 20  # measured: a sync per 64 MiB writes 1.2 to 1.5 GB/s, per block 0.1
READER_POLL_S = 0.002
MIN_KEPT_PAGES, MAX_KEPT_PAGES = 16, 256  # free pages that stay in the file for the next commits:
KEPT_SHARE = 16  # this part of the used ones, within these bounds
LAST_SEQUENCE = (1 << 64) - 1
META_TRIES = 4
NEWEST_LOOKED_AT = 64  # blocks at the recent end, which are roughly in order of use


class ShardDamaged(TierError):
    """The shard's file was truncated or removed; nothing in it can be trusted."""


class ShardBusy(ShardDamaged):
    """The shard is being checked or replaced; no new damage is known."""


class Shard:
    """An open environment. Its file does not grow beyond `map_bytes` and `limit_bytes`."""

    def __init__(
        self,
        path: Path,
        map_bytes: int,
        *,
        storage: Storage,
        clock: Callable[[], float] = time.time,
        readonly: bool = False,
        on_commit: Callable[[Writer], None] = lambda writer: None,
        guard: DiskGuard | None = None,
    ) -> None:
        self.path = path
        self.map_bytes = map_bytes
        self.limit_bytes = map_bytes  # what the file may take, at present
        self._storage = storage
        self._clock = clock
        self._on_commit = on_commit  # called after every commit, on its thread
        self.guard = guard
        self._env = storage.open_env(path, map_bytes=map_bytes, readonly=readonly)
        self._file: DataFile | None = None
        try:
            self._file = storage.open_file(path / "data.mdb")
            self._dbs = self._open_databases(create=not readonly)
            self._file_bytes = storage.stat(self._file).st_size
            self.page_bytes = int(self._env.stat()["psize"])
            self._write_lock = threading.Lock()
            self._unsynced_bytes = 0
            self._stuck: int | None = None  # the commit seen by a reader that does not end
            self._slack_pages = 0  # extra reserve learned from a full map
            self.totals = self.read_totals()
            self._found = self._look_around()
        except BaseException:
            self.close()
            raise

    def _open_databases(self, *, create: bool) -> Databases:
        def opened(name: str) -> Database:
            return self._env.open_db(name.encode(), create=create)

        return Databases(*(opened(name) for name in Databases._fields))

    @property
    def _data_file(self) -> DataFile:
        assert self._file is not None, f"{self.path} is closed"
        return self._file

    def close(self) -> None:
        """Closes without a sync. No other method may be running."""
        self._env.close()
        file, self._file = self._file, None
        if file is not None:
            self._storage.close_file(file)

    # Reading

    @contextmanager
    def _reading(self) -> Iterator[Snapshot]:
        """The last commit, read without LMDB, which trusts its pages and may end the process. A
        read transaction is open meanwhile, so that its pages are not reused."""
        self.check()
        for _ in range(META_TRIES):
            txn = self._storage.begin(self._env, write=False)
            try:
                pages = PageFile(self._data_file.cached, self.map_bytes)
                head = pages.head(txn.id() & 1)
                if head is not None and head.transaction == txn.id():
                    yield Snapshot(self._storage, pages, pages.trees(head))
                    return
            except (struct.error, Torn) as error:
                raise ShardDamaged(f"{self.path} is damaged: {error}") from error
            finally:
                txn.abort()  # without its head, because two commits have been made since
        raise ShardDamaged(f"{self.path} lacks the head of its last commit")

    def check(self) -> None:
        """Raises ShardDamaged if the file shrank or vanished: touching its map would be fatal."""
        known = self._file_bytes  # taken first: a writer may be growing the file meanwhile
        status = self._storage.stat(self._data_file)
        if status.st_nlink == 0:
            raise ShardDamaged(f"{self.path / 'data.mdb'} was removed")
        if status.st_size < known:
            raise ShardDamaged(f"{self.path / 'data.mdb'} has {status.st_size} bytes, had {known}")

    def find(self, keys: Sequence[PrefixKey]) -> list[IndexEntry]:
        with self._reading() as snapshot:
            return snapshot.find(keys)

    def have_windows(self, keys: Sequence[PrefixKey]) -> list[bool]:
        with self._reading() as snapshot:
            return snapshot.have_windows(keys)

    def will_need(self, entries: Sequence[IndexEntry]) -> None:
        """Starts reading these records. Neighbours on disk become one request."""
        start = end = 0
        for place in (entry.place for entry in entries):
            if start < end and 0 <= place.offset - end <= self.page_bytes:
                end = place.offset + place.nbytes
                continue
            if start < end:
                self._storage.will_need(self._data_file, start, end - start)
            start, end = place.offset, place.offset + place.nbytes
        if start < end:
            self._storage.will_need(self._data_file, start, end - start)

    def read(self, key: PrefixKey, entry: IndexEntry, into: memoryview) -> memoryview:
        """Reads the record of `entry` into `into`, as far as it exists. `into` is page-aligned and
        has at least `room_for(entry)` bytes."""
        nbytes, offset = entry.place.nbytes, entry.place.offset
        if offset:
            span = into[: self.room_for(entry)]
            count = self._storage.read(self._data_file, span, offset - PAGE_HEADER)
            return into[PAGE_HEADER : max(PAGE_HEADER, min(count, PAGE_HEADER + nbytes))]
        with self._reading() as snapshot:
            data = (snapshot.get("data", key) or b"")[:nbytes]
        into[: len(data)] = data
        return into[: len(data)]

    def room_for(self, entry: IndexEntry) -> int:
        """Bytes that `read` needs: the whole pages of the record."""
        return -(-(entry.place.nbytes + PAGE_HEADER) // self.page_bytes) * self.page_bytes

    def entries(self, after: PrefixKey | None, limit: int) -> list[tuple[PrefixKey, IndexEntry]]:
        """Up to `limit` blocks in order of their keys, from the one after `after`."""
        with self._reading() as snapshot:
            rows = (row for row in snapshot.rows("index", after or b"") if row[0] != after)
            return [(PrefixKey(key), IndexEntry.unpack(data)) for key, data in islice(rows, limit)]

    def read_totals(self) -> Totals:
        with self._reading() as snapshot:
            return snapshot.read_totals()

    def _look_around(self) -> IdleClock:
        with self._reading() as snapshot:
            newest = snapshot.rows("order", pack_sequence(LAST_SEQUENCE), back=True)
            rows = islice(newest, NEWEST_LOOKED_AT)
            newest_s = max((unpack_order(data)[1] for _, data in rows), default=0)
        return IdleClock(self.totals.next_sequence, newest_s, int(self._clock()))

    def accounts(self) -> dict[PrefixKey, Account]:
        with self._reading() as snapshot:
            rows = snapshot.rows("scopes")
            return {PrefixKey(root): Account.unpack(data) for root, data in rows}

    def walk(self) -> str | None:
        """Reads every branch and leaf page. Returns what is wrong, if anything."""
        counts: dict[str, int] = {}
        windows = 0
        with self._reading() as snapshot:
            for name in Databases._fields:
                counts[name] = sum(1 for _ in snapshot.keys(name))
            windows = sum(is_window(key) for key in snapshot.keys("index"))
            num_blocks = snapshot.read_totals().num_blocks
        if not counts["data"] == counts["index"] == counts["order"] == num_blocks + windows:
            return f"its databases disagree: {counts}, {num_blocks} blocks in all"
        return None

    def used_bytes(self) -> int:
        """Bytes of the map in used pages."""
        with self._reading() as snapshot:
            return snapshot.num_pages() * self.page_bytes

    def file_bytes(self) -> int:
        """Bytes the file takes on the file system, like `du`."""
        return self._storage.stat(self._data_file).st_blocks * 512

    # Writing

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """One write transaction, committed at the end of the block. An exception rolls it back."""
        with self._write_lock:
            self.check()
            txn = self._storage.begin(self._env, write=True)
            try:
                writer = Writer(
                    self._storage,
                    txn,
                    self._dbs,
                    page_bytes=self.page_bytes,
                    room_pages=self.room_bytes // self.page_bytes - self._slack_pages,
                    end_bytes=max(self.limit_bytes, self._file_bytes),
                    now_s=int(self._clock()),
                    vet=self._vet(txn.id() - 1),
                    found=self._found,
                    guard=self.guard,
                    before_free=self.mend_run,
                )
                yield writer
                writer.finish()
                self._storage.commit(txn)
            except (struct.error, Torn) as error:
                txn.abort()
                raise ShardDamaged(f"{self.path} is damaged: {error}") from error
            except BaseException:
                txn.abort()
                raise
            self.totals = writer.totals
            self._file_bytes = self._storage.stat(self._data_file).st_size
            self._unsynced_bytes += writer.written_bytes
        self._on_commit(writer)
        if self._unsynced_bytes >= SYNC_BYTES:
            self.sync()

    @property
    def room_bytes(self) -> int:
        return min(self.map_bytes, self.limit_bytes)

    def give_back(self) -> None:
        """Gives the file's free pages back to the file system, but for some that the next commits
        take. Needs no room there. Pages that a reader may see stay.

        Raises ShardDamaged if the list of free pages cannot be read.
        """
        self.sync()  # so that no earlier state, with pages free since, is found after a power cut
        path = self.path / "data.mdb"
        in_use = self.used_bytes() // self.page_bytes
        keep = min(MAX_KEPT_PAGES, max(MIN_KEPT_PAGES, in_use // KEPT_SHARE))
        with self._write_lock:
            self.check()
            txn = self._storage.begin(self._env, write=True)  # nobody else writes meanwhile
            try:
                last = int(self._env.info()["last_txnid"])
                before = min(last, self._oldest_reader() or last)
                self._storage.punch(path, free_spans(path, self.map_bytes, before, keep))
            except Torn as torn:
                raise ShardDamaged(f"the free pages of {self.path}: {torn}") from torn
            finally:
                txn.abort()

    def _vet(self, transaction: int) -> PageVet:
        """For a write transaction on the commit of this number."""
        pages = PageFile(self._data_file.cached, self.map_bytes)
        head = pages.head(transaction & 1)
        if head is None or head.transaction != transaction:
            raise Torn("it lacks the head of its last commit")
        return PageVet(pages, head)

    def mend_run(self, offset: int, nbytes: int) -> None:
        """Repairs the page header before the record at `offset`, if it is damaged. LMDB frees the
        number of pages given there, and crashes if there are fewer."""
        first = offset // self.page_bytes
        at = first * self.page_bytes
        head = self._storage.peek(self._data_file, PAGE_HEADER, at)
        if offset and not is_run_head(head, first, nbytes):
            self._storage.patch(self.path / "data.mdb", run_head(first, nbytes), at)

    def fix(self, fixes: Fixes) -> None:
        """Applies the fixes of a check, so that the databases agree."""
        for _, first, nbytes in fixes.keys:
            self.mend_run(first * self.page_bytes + PAGE_HEADER if first else 0, nbytes)
        dbs, storage = self._dbs, self._storage
        txn = storage.begin(self._env, write=True)
        try:
            for key, _, _ in fixes.keys:
                storage.delete(txn, key, dbs.data)
                storage.delete(txn, key, dbs.index)
            for sequence in fixes.sequences:
                storage.delete(txn, pack_sequence(sequence), dbs.order)
            for sequence, key, used_s in fixes.places:
                storage.put(txn, pack_sequence(sequence), pack_order(key, used_s), dbs.order)
            if fixes.accounts is not None and fixes.totals is not None:
                txn.drop(dbs.scopes, delete=False)
                for root, account in fixes.accounts.items():
                    storage.put(txn, root, account.pack(), dbs.scopes)
                storage.put(txn, b"totals", fixes.totals.pack(), dbs.state)
            storage.commit(txn)
        except BaseException:
            txn.abort()
            raise
        self.totals = self.read_totals()

    def sync(self) -> None:
        """Makes all commits so far durable."""
        self._unsynced_bytes = 0
        self._storage.sync(self._env)

    def learn_slack(self, nbytes: int) -> None:
        """Keeps `nbytes` more of the map free, after it was unexpectedly full."""
        limit = self.room_bytes // self.page_bytes // 4
        self._slack_pages = min(limit, self._slack_pages + -(-nbytes // self.page_bytes))

    def wait_for_readers(self, timeout_s: float) -> bool:
        """Whether a reader prevented the reuse of freed pages. Waits for it briefly. A reader that
        stays is waited for only once. Not inside a write transaction."""
        oldest = self._oldest_reader()
        if oldest is None:
            return False
        give_up = time.monotonic() + timeout_s
        while oldest is not None and oldest != self._stuck and time.monotonic() < give_up:
            time.sleep(READER_POLL_S)
            oldest = self._oldest_reader()
        self._stuck = oldest
        return True

    def _oldest_reader(self) -> int | None:
        """The commit that the oldest reader sees; None if all see the last one."""
        last = int(self._env.info()["last_txnid"])
        rows = [line.split() for line in self._env.readers().splitlines()[1:]]
        seen = [int(row[-1]) for row in rows if row and row[-1].isdigit()]
        return min((commit for commit in seen if commit < last), default=None)

    def forget_dead_readers(self) -> int:
        """Clears reader slots of dead processes, which would prevent the reuse of freed pages."""
        return int(self._env.reader_check())
