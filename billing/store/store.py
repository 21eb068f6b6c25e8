"""The ledger's database: its connections, its transactions, and the one that applies a batch.

SQLAlchemy Core on SQLite (WAL) or PostgreSQL. `LedgerStore` is shared: the ledger thread, admin
operations and the CLI call its writer methods, each of which is one transaction. Any thread may
read. Several processes may share one database without races on balances: SQLite admits one writer
at a time, and on PostgreSQL a transaction locks the accounts it touches in order of their names.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy.exc
from sqlalchemy import Connection, Engine, delete, select, text
from sqlalchemy.exc import DBAPIError, OperationalError

from billing.errors import LedgerUnavailable, Unwritable
from billing.gate.commands import Command, moves_money
from billing.gate.entries import Entry
from billing.gate.gate import apply_all
from billing.gate.holds import StoredHold
from billing.prices.book import PriceBook
from billing.store import claim as store_claim
from billing.store.batch import load_work, write_work
from billing.store.dialects import insert_into
from billing.store.prepared import HotStatements
from billing.store.rows import read_hold
from billing.store.schema import SCHEMA, holds, meta
from billing.store.wal import WriteAheadLog

__all__ = ["Connection", "LedgerStore", "cause_of"]

T = TypeVar("T")

RETRIES = 8  # of a transaction after a conflict with another process
FAILED_COMMITS = 2  # in a row, after which the store counts as unwritable
SCHEMA_ROW = "schema"  # the name of the row with the schema's version
PROBE = "probe"  # the name of a row that no transaction leaves behind
CHECKPOINT_COMMANDS = 1000  # about 5,000 pages, 20 MB of log
CHECKPOINT_ROUNDS = 4
LANE_CHECKPOINT_PAGES = 40_000  # 160 MB, if nobody calls `checkpoint`
LANE_CACHE_KIB = 16 << 10  # room for the pages of a batch


class LedgerStore:
    """One database. Thread-safe; `close` ends its connections."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._closed = ""  # why it must not write; empty while it may
        self.insert: Callable[..., Any] = partial(insert_into, dialect=engine.dialect.name)
        self._hot = HotStatements(engine.dialect.name)
        self._lane = threading.Lock()
        self._lane_connection: Connection | None = None  # of `apply`, kept: opening costs a third
        self._index_holder: Any = None  # a connection that is never used
        is_sqlite = engine.dialect.name == "sqlite"
        self._log = WriteAheadLog(Path(str(engine.url.database))) if is_sqlite else None
        self._commands_since_checkpoint = 0
        self._claim: store_claim.Claim | None = None
        driver: Any = engine.dialect.dbapi  # the hot statements raise its errors unwrapped
        self._passing = (OperationalError, driver.OperationalError)
        self._failures = (DBAPIError, driver.Error)
        # Raised for what a statement says, not for the state of the database.
        self._refusals = tuple(
            getattr(module, name)
            for module in (sqlalchemy.exc, driver)
            for name in ("IntegrityError", "DataError", "ProgrammingError", "NotSupportedError")
        )
        self._num_failed = 0  # commits that failed since the last that did not
        self._failure = ""  # why the last of them did

    def claim(self, owner: str, *, wait_s: float = store_claim.WAIT_S) -> None:
        """Holds a server's name until `close`. Raises `StoreError` if another server has it."""
        self._claim = store_claim.claim(self.engine, owner, wait_s=wait_s)

    def close(self) -> None:
        self._leave_lane()
        if self._index_holder is not None:
            self._index_holder.close()
        if self._claim is not None:
            self._claim.release()
        self.engine.dispose()
        if self._log is not None:
            self._log.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A consistent read-only view. Raises `LedgerUnavailable` if the store cannot be read."""
        try:
            with self.engine.connect() as connection, connection.begin():
                if self.engine.dialect.name == "postgresql":
                    connection.execute(
                        text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                    )
                yield connection
        except self._failures as error:
            if isinstance(error, self._refusals):
                raise
            if self._log is not None:
                self._log.note(error)
            raise LedgerUnavailable(f"the ledger cannot be read: {self._why(error)}") from error

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[Connection]:
        """One write transaction. Commits at the end, to disk if `durable`."""
        connection = self.engine.connect().execution_options(durable=durable)
        with connection, connection.begin():
            yield connection

    @contextmanager
    def _batch(self, *, durable: bool) -> Iterator[Connection]:
        """The write transaction of one batch of commands, on the connection kept for them."""
        with self._lane:
            try:
                if self._lane_connection is None:
                    self._lane_connection = self._open_lane()
                connection = self._lane_connection
                connection.info["durable"] = durable
                with connection.begin():
                    yield connection
            except BaseException:
                self._leave_lane()
                raise

    def _open_lane(self) -> Connection:
        connection = self.engine.connect()
        if self._log is not None:
            driver: Any = connection.connection.driver_connection
            # `checkpoint` does this on another thread.
            driver.execute(f"PRAGMA wal_autocheckpoint={LANE_CHECKPOINT_PAGES}")
            driver.execute(f"PRAGMA cache_size=-{LANE_CACHE_KIB}")
        return connection

    def _leave_lane(self) -> None:
        """Closes the kept connection, which may be broken. The next batch opens another."""
        connection, self._lane_connection = self._lane_connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()

    def retrying(self, operation: Callable[[Connection], T], *, durable: bool = True) -> T:
        """Runs `operation` in a transaction, and retries it after conflicts with other processes.

        Raises `LedgerUnavailable` if the store cannot be written.
        """
        return self._repeat(operation, partial(self.writing, durable=durable))

    def _repeat(
        self,
        operation: Callable[[Connection], T],
        transaction: Callable[[], AbstractContextManager[Connection]],
    ) -> T:
        for attempt in range(RETRIES):
            self._check_open()
            try:
                with transaction() as connection:
                    before = self._num_changes(connection)
                    result = operation(connection)
                    has_written = before != self._num_changes(connection)
                if has_written or self._log is None:
                    self._num_failed = 0
                return result
            except self._passing as error:  # locked, deadlock, serialisation, lost connection
                if self._log is not None:
                    self._log.note(error)
                if attempt == RETRIES - 1:
                    self._note_failure(error)
                    raise LedgerUnavailable(
                        f"the ledger cannot be written now: {self._why(error)}"
                    ) from error
                time.sleep(0.002 * 2**attempt)
            except self._failures as error:
                if not isinstance(error, self._refusals):
                    self._note_failure(error)
                if self._log is not None:
                    self._log.note(error)
                raise Unwritable(f"the ledger cannot be written: {cause_of(error)}") from error
        raise AssertionError("unreachable")

    def _num_changes(self, connection: Connection) -> int:
        """Rows that SQLite's connection has changed: a commit without any needs no disk."""
        if self._log is None:
            return 0
        driver: Any = connection.connection.driver_connection
        changes: int = driver.total_changes
        return changes

    def _note_failure(self, error: Exception) -> None:
        self._failure = cause_of(error)
        self._num_failed += 1

    @property
    def unwritable(self) -> str:
        """Why commits fail; empty if they do not. A single failure may pass, a full disk does
        not."""
        if not self._num_failed:
            return ""
        return self.full_disk or (self._failure if self._num_failed >= FAILED_COMMITS else "")

    def probe(self) -> None:
        """Commits nothing of consequence, to learn whether the store can be written again.

        Raises `LedgerUnavailable` if it cannot.
        """

        def touch(connection: Connection) -> None:
            connection.execute(self.insert(meta).values(name=PROBE, value=b""))
            connection.execute(delete(meta).where(meta.c.name == PROBE))

        self.retrying(touch)

    @property
    def full_disk(self) -> str:
        """A message if the disk is full, else empty."""
        return self._log.full_disk if self._log is not None else ""

    def _why(self, error: Exception) -> str:
        """The driver's message, or that the disk is full, which SQLite reports as an I/O error."""
        said, full = cause_of(error), self.full_disk
        return f"{said} ({full})" if full else said

    def clock_ns(self) -> int | None:
        """The time of the database's host; None if it is this host."""
        if self.engine.dialect.name != "postgresql":
            return None
        with self.engine.connect() as connection:
            micros = connection.scalar(
                text("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
            )
        return int(micros or 0) * 1000

    @property
    def syncs_apart(self) -> bool:
        """Whether `apply` can commit without waiting for the disk, and `sync` make it durable."""
        return self._log is not None

    def sync(self) -> None:
        """Makes all commits so far durable. Raises OSError or `LedgerUnavailable`."""
        assert self._log is not None
        self._log.sync()

    @property
    def unsynced(self) -> bool:
        """Whether `sync` would have anything to do."""
        return self._log is not None and self._log.unsynced

    @property
    def failed(self) -> str:
        """Why nothing can be written until a restart; empty if it can."""
        return self._closed or (self._log.failed if self._log is not None else "")

    def check_claim(self) -> None:
        """Write nothing from now on if another server has taken the name: it has settled our
        holds as those of an earlier run, and charged what was known of them then.

        Raises `LedgerUnavailable` while that cannot be known.
        """
        try:
            lost = self._claim is not None and self._claim.is_lost()
        except self._failures as error:
            raise LedgerUnavailable(f"the ledger cannot be read: {self._why(error)}") from error
        if lost:
            self._closed = (
                "the database restarted, and another server has taken this server's name; give "
                "each a billing.server_name of its own, and start this one again"
            )

    def check_schema(self) -> None:
        """Stops all writes if another version has changed the database's schema meanwhile.

        This version would omit what the other one counts.
        """
        with self.reading() as connection:
            row = connection.scalar(select(meta.c.value).where(meta.c.name == SCHEMA_ROW))
        if row != SCHEMA.encode():
            found = row.decode() if row else "unnumbered"
            self._closed = (
                f"another version brought the ledger from schema {SCHEMA} to {found}; "
                "start this server again with that version"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise LedgerUnavailable(f"the ledger is closed: {self._closed}")
        if self._log is not None:
            self._log.check()

    def renew_log(self) -> None:
        """Renews the log; for a server, once at its start. See `WriteAheadLog.renew`.

        SQLite drops the log's index with a process's last connection. Each failed batch closes one.
        On a full disk the index then finds no room, and where the disk's blocks are smaller than
        memory pages, a write to it ends the process (SIGBUS). So one connection stays open.
        """
        if self._log is not None:
            self._index_holder = self._index_holder or self.engine.raw_connection()
            with self.writing():  # nobody else writes meanwhile
                self._log.renew()

    def checkpoint(self) -> None:
        """Copies the log into the database, if much was written, so that the log starts over.

        Runs beside writers. What they add meanwhile is copied in further rounds.
        """
        if (
            self._log is None
            or self._log.failed
            or self._commands_since_checkpoint < CHECKPOINT_COMMANDS
        ):
            return
        self._commands_since_checkpoint = 0
        connection = self.engine.raw_connection()
        try:
            cursor = connection.cursor()
            for _ in range(CHECKPOINT_ROUNDS):
                _, num_pages, copied = cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                if num_pages == copied:
                    self._log.keep_reserve()
                    break
        except sqlite3.Error as error:
            self._log.note(error)
            raise LedgerUnavailable(self._why(error)) from error
        finally:
            connection.close()

    def apply(
        self,
        commands: Sequence[Command],
        book: PriceBook,
        clock_ns: Callable[[], int],
        *,
        sync: bool = True,
    ) -> tuple[list[object], list[Entry]]:
        """Applies a batch in one transaction. Returns a result or exception for each, and the new
        entries.

        Durable on return. With `sync=False`, if the store syncs apart, durable only after `sync`.
        """

        def operation(connection: Connection) -> tuple[list[object], list[Entry]]:
            work = load_work(self._hot, connection, commands, book, clock_ns)
            results = apply_all(work, commands)
            write_work(self._hot, connection, work)
            return results, work.new_entries

        self._commands_since_checkpoint += len(commands)
        durable = sync and any(moves_money(command) for command in commands)
        applied = self._repeat(operation, partial(self._batch, durable=durable))
        if self._log is not None and not durable:
            self._log.unsynced = True
        return applied

    def all_holds(self) -> list[StoredHold]:
        """Every hold, one per running request."""
        with self.reading() as connection:
            return [read_hold(row) for row in connection.execute(select(holds)).mappings()]


def cause_of(error: Exception) -> str:
    """The driver's message, without SQLAlchemy's wrapper."""
    return str(getattr(error, "orig", None) or error).strip()
