"""`state.sqlite3`: what is worth keeping over a restart. A convenience, not a record.

It has the dashboard's requests (`request_memory`), and turns and stored responses (`kept_turns`).

One thread writes it, in small transactions. A damaged file is replaced. A file that cannot be
opened is left as it is. A failed write loses its data, and the first failure is logged. What must
not be lost is in the ledger.
"""

import logging
import sqlite3
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

FILE_NAME: Final = "state.sqlite3"
SCHEMA: Final = 1  # a file of another schema is replaced
TABLES: Final = """
CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS kept (name BLOB PRIMARY KEY, owner BLOB NOT NULL,
    used_s INTEGER NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS kept_used ON kept (used_s);
CREATE INDEX IF NOT EXISTS kept_shares ON kept (owner, used_s, size);
"""
WHAT: Final = "turns, responses and the dashboard's requests"
BUSY_S = 5.0  # the longest that a write or a query waits for another program
QUEUE: Final = 10_000  # maximum of pending writes
QUEUE_BYTES: Final = 64 << 20  # maximum of their bytes together
GATHER: Final = 500  # maximum of writes in one batch
GATHER_BYTES: Final = 8 << 20  # a batch ends with the write that reaches this

Write = Callable[[sqlite3.Connection], object]


class StateFile:
    """The file. Any thread may call `rows` and, after `start`, `hand_over`. One thread writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending = PendingWrites()
        self._thread: threading.Thread | None = None
        self._failed = self._closing = False
        self._begin(path)

    def rows(self, statement: str, *values: object) -> list[Any]:
        """The result of a query; empty if the file cannot be read."""
        if self._failed:
            return []
        try:
            with closing(self._connect(self._path)) as connection:
                return connection.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            logger.warning(f"{self._path} cannot be read, so {WHAT} are unknown: {error}")
            return []

    def start(self) -> None:
        if not self._failed:
            self._closing = False
            self._pending.begin()
            self._thread = threading.Thread(
                target=self._write_all, name=self._path.stem, daemon=True
            )
            self._thread.start()

    def hand_over(self, write: Write, nbytes: int = 0, *, owner: Hashable = None) -> None:
        """Queues a write. Drops it before `start`.

        `nbytes` is the size of the data that `write` holds. While too much is pending, the owner
        with the most loses its oldest writes. None owns the program's own.
        """
        if self._thread is not None and self._thread.is_alive():
            self._pending.add(write, owner, nbytes)

    def close(self) -> None:
        """Writes what is pending and stops; a file that cannot be written does not delay it."""
        thread, self._thread = self._thread, None
        self._closing = True
        self._pending.end()
        if thread is not None:
            thread.join()

    def _begin(self, path: Path) -> None:
        """Prepares the file; replaces one that is damaged or of another version."""
        for attempt in range(2):
            try:
                with closing(self._connect(path)) as connection:
                    version = connection.execute("PRAGMA user_version").fetchone()[0]
                    if version not in (0, SCHEMA):
                        raise sqlite3.DatabaseError(f"its schema is {version}")
                    connection.executescript(f"{TABLES}; PRAGMA user_version = {SCHEMA}")
                return
            except (sqlite3.OperationalError, OSError) as error:  # locked, disk full or no file
                self._give_up(error)
                return
            except sqlite3.Error as error:
                if attempt:
                    self._give_up(error)
                    return
                logger.warning(f"{path} cannot be read and is replaced: {error}")
                for suffix in ("", "-wal", "-shm", "-journal"):  # what is beside it may be a copy
                    path.with_name(path.name + suffix).unlink(missing_ok=True)

    def _connect(self, path: Path) -> sqlite3.Connection:
        path.touch(mode=0o600)
        connection = sqlite3.connect(path, timeout=BUSY_S)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _write_all(self) -> None:
        try:
            connection = self._connect(self._path)
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)
            return
        try:
            while batch := self._pending.next_batch():
                try:
                    with connection:
                        for write in batch:
                            write(connection)
                    if self._failed:
                        self._failed = False
                        logger.info(f"{WHAT} are remembered again")
                except Exception as error:  # noqa: BLE001  the top of the thread, which goes on
                    self._give_up(error)
                    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                    if self._closing and code == sqlite3.SQLITE_BUSY:
                        return  # the rest would fail too, each after its wait
        finally:
            connection.close()

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            logger.error(f"{WHAT} will not be remembered over a restart: {self._path}: {error}")
        self._failed = True


class PendingWrites:
    """The writes yet to make, in order, bounded by number and by bytes. Any thread may add; one
    takes batches. After `end` it waits for no more.

    When they are too many, the owner with the most loses its oldest, so no tenant can displace the
    writes of the others.

    A batch that has been taken counts no longer, so a slow write of one owner takes no room from
    the others.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = count()
        self._writes: OrderedDict[int, tuple[Write, Hashable, int]] = OrderedDict()
        self._owned: dict[Hashable, OrderedDict[int, None]] = {}  # its writes, oldest first
        self._owned_bytes: Counter[Hashable] = Counter()
        self._num_bytes = 0
        self._ended = False

    def begin(self) -> None:
        self._ended = False

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def add(self, write: Write, owner: Hashable, nbytes: int) -> None:
        """Adds a write with `nbytes` of data, unless it alone is too large."""
        if nbytes > QUEUE_BYTES:
            return
        with self._changed:
            number = next(self._numbers)
            self._writes[number] = write, owner, nbytes
            self._owned.setdefault(owner, OrderedDict())[number] = None
            self._owned_bytes[owner] += nbytes
            self._num_bytes += nbytes
            while self._num_bytes > QUEUE_BYTES:
                self._drop(max(self._owned, key=self._owned_bytes.__getitem__))
            if len(self._writes) > QUEUE:
                self._drop(max(self._owned, key=lambda owner: len(self._owned[owner])))
            self._changed.notify()

    def next_batch(self) -> list[Write]:
        """The oldest writes, at least one; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._writes or self._ended)
            batch: list[Write] = []
            gathered = 0
            while self._writes and len(batch) < GATHER and gathered < GATHER_BYTES:
                write, nbytes = self._remove(next(iter(self._writes)))
                batch.append(write)
                gathered += nbytes
            return batch

    def _drop(self, owner: Hashable) -> None:
        self._remove(next(iter(self._owned[owner])))

    def _remove(self, number: int) -> tuple[Write, int]:
        write, owner, nbytes = self._writes.pop(number)
        self._num_bytes -= nbytes
        self._owned_bytes[owner] -= nbytes
        owned = self._owned[owner]
        del owned[number]
        if not owned:
            del self._owned[owner], self._owned_bytes[owner]
        return write, nbytes
