"""The ledger's database: opening, migrating, and the one transaction that applies a batch.

SQLAlchemy Core on SQLite (WAL) or PostgreSQL. `LedgerStore` is shared: its writer methods are
called by the ledger thread, by admin operations and by the CLI; each is one transaction. Readers
take any thread. Several processes may share one database: SQLite admits one writer at a time, on
PostgreSQL a transaction locks the accounts it touches in order of their names, so balances never
race.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    create_engine,
    event,
    inspect,
    select,
    text,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from billing.errors import LedgerUnavailable, StoreError, Unwritable
from billing.gate.commands import (
    CloseMonth,
    Command,
    Expire,
    MoveWallet,
    Reap,
    Settle,
    advance_of,
    fingerprint_of,
    keys_of,
    moves_money,
)
from billing.gate.entries import CORRECTABLE, Entry
from billing.gate.gate import apply_all
from billing.gate.holds import Advance, StoredHold
from billing.gate.rollups import rollups
from billing.gate.wallets import told
from billing.gate.work import Work
from billing.money import format_units
from billing.prices.book import PriceBook
from billing.store import claim as store_claim
from billing.store import expiring as store_expiring
from billing.store import plans as store_plans
from billing.store import undelivered as store_undelivered
from billing.store import wallets as store_wallets
from billing.store.dialects import insert_into
from billing.store.prepared import HotStatements
from billing.store.rows import (
    account_row,
    advance_row,
    entry_row,
    hold_row,
    read_account,
    read_advance,
    read_entry,
    read_hold,
)
from billing.store.schema import advances, entries, holds, use_postgresql
from billing.store.trail import add_trail
from billing.store.wal import WriteAheadLog

__all__ = ["Connection", "LedgerStore", "database_url", "open_store"]

T = TypeVar("T")

REVISION = "0012"
MIGRATIONS = Path(__file__).parent / "migrations"
RETRIES = 8  # of a transaction that another process made fail
BUSY_TIMEOUT_S = 10
CHECKPOINT_COMMANDS = 1000  # some 5,000 pages, 20 MB of log
CHECKPOINT_ROUNDS = 4
LANE_CHECKPOINT_PAGES = 40_000  # 160 MB: where nobody calls `checkpoint`


def database_url(data_dir: Path) -> str:
    """The default database of a data directory."""
    return f"sqlite:///{data_dir / 'ledger.sqlite3'}"


def open_store(url: str, *, create: bool = True) -> "LedgerStore":
    """Open a database and bring its schema up to date. Raises `StoreError`.

    `create=False` refuses a SQLite file that does not exist, as reading commands want.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(
            f"{url!r} is not a database URL such as sqlite:///ledger.sqlite3"
        ) from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(f"{parsed.get_backend_name()} is not supported; use SQLite or PostgreSQL")
    if parsed.get_backend_name() == "sqlite":
        _check_sqlite_path(parsed.database, create)
    try:
        engine = _engine(parsed)
        try:
            _migrate(engine)
        except BaseException:
            engine.dispose()
            raise
    except ModuleNotFoundError as error:
        raise StoreError('PostgreSQL needs a driver: pip install "cachesvc[postgres]"') from error
    except SQLAlchemyError as error:
        where = parsed.render_as_string(hide_password=True)
        raise StoreError(f"cannot open the ledger at {where}: {_cause(error)}") from error
    return LedgerStore(engine)


def _check_sqlite_path(path: str | None, create: bool) -> None:
    if not path or path == ":memory:":
        raise StoreError("a ledger needs a file: sqlite:////path/to/ledger.sqlite3")
    if not create and not Path(path).exists():
        raise StoreError(f"there is no ledger at {path}; start the server or create a tenant first")
    Path(path).parent.mkdir(parents=True, exist_ok=True)


def _engine(url: Any) -> Engine:
    if url.get_backend_name() == "postgresql":
        use_postgresql()
        return create_engine(url, pool_size=4, max_overflow=8, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA cache_size=-65536")
    connection.execute("PRAGMA wal_autocheckpoint=4000")


def _begin_sqlite(connection: Connection) -> None:
    """Straight to the driver: this runs for every batch, and Core would take longer than the
    batch.
    """
    driver: Any = connection.connection.driver_connection
    durable = connection.get_execution_options().get("durable", connection.info.get("durable"))
    if durable is None:
        driver.execute("BEGIN")
        return
    # Entries survive a power cut. Holds need not: neither do the requests they belong to.
    level = "FULL" if durable else "NORMAL"
    if connection.info.get("synchronous") != level:
        driver.execute(f"PRAGMA synchronous={level}")
        connection.info["synchronous"] = level
    driver.execute("BEGIN IMMEDIATE")


def _cause(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip()


def _migrate(engine: Engine) -> None:
    """Bring the schema to `REVISION`; a newer one is refused, an older one upgraded under a
    lock.
    """
    with engine.connect() as connection:
        current = _revision(connection)
    if current == REVISION:
        return
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.connect().execution_options(durable=True) as connection, connection.begin():
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(4715013)"))
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, REVISION)
        except CommandError as error:
            raise StoreError(
                f"the ledger has schema {current!r}, which this version does not know; "
                "run the version that wrote it, or a newer one"
            ) from error


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


class LedgerStore:
    """One database. Thread-safe; `close` ends its connections."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.insert: Callable[..., Any] = partial(insert_into, dialect=engine.dialect.name)
        self._hot = HotStatements(engine.dialect.name)
        self._lane = threading.Lock()
        self._lane_connection: Connection | None = None  # of `apply`, kept: opening costs a third
        is_sqlite = engine.dialect.name == "sqlite"
        self._log = WriteAheadLog(Path(str(engine.url.database))) if is_sqlite else None
        self._commands_since_checkpoint = 0
        self._release: Callable[[], None] = lambda: None
        driver: Any = engine.dialect.dbapi  # the hot statements raise its errors unwrapped
        self._passing = (OperationalError, driver.OperationalError)
        self._failures = (DBAPIError, driver.Error)

    def claim(self, owner: str, *, wait_s: float = store_claim.WAIT_S) -> None:
        """Hold a server's name until `close`. Raises `StoreError` where another server has it."""
        self._release = store_claim.claim(self.engine, owner, wait_s=wait_s)

    def close(self) -> None:
        self._leave_lane()
        self._release()
        self.engine.dispose()
        if self._log is not None:
            self._log.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A consistent read-only view. Raises `LedgerUnavailable` when the store cannot be read."""
        try:
            with self.engine.connect() as connection, connection.begin():
                if self.engine.dialect.name == "postgresql":
                    connection.execute(
                        text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                    )
                yield connection
        except self._passing as error:
            raise LedgerUnavailable(f"the ledger cannot be read: {_cause(error)}") from error

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[Connection]:
        """One write transaction; commits at the end, to disk if `durable`."""
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
            # `checkpoint` does it, on another thread.
            driver.execute(f"PRAGMA wal_autocheckpoint={LANE_CHECKPOINT_PAGES}")
        return connection

    def _leave_lane(self) -> None:
        """Close the kept connection, which may be broken; the next batch opens another."""
        connection, self._lane_connection = self._lane_connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()

    def retrying(self, operation: Callable[[Connection], T], *, durable: bool = True) -> T:
        """Run `operation` in a transaction, again when another process made it fail.

        Raises `LedgerUnavailable` when the store cannot be written.
        """
        return self._repeat(operation, partial(self.writing, durable=durable))

    def _repeat(
        self,
        operation: Callable[[Connection], T],
        transaction: Callable[[], AbstractContextManager[Connection]],
    ) -> T:
        for attempt in range(RETRIES):
            if self._log is not None:
                self._log.check()
            try:
                with transaction() as connection:
                    return operation(connection)
            except self._passing as error:  # locked, deadlock, serialisation, lost connection
                if self._log is not None:
                    self._log.note(error)
                if attempt == RETRIES - 1:
                    raise LedgerUnavailable(
                        f"the ledger cannot be written now: {_cause(error)}"
                    ) from error
                time.sleep(0.002 * 2**attempt)
            except self._failures as error:
                raise Unwritable(f"the ledger cannot be written: {_cause(error)}") from error
        raise AssertionError("unreachable")

    def clock_ns(self) -> int | None:
        """The time of the database's own host; None where it is this one."""
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
        """Make durable what was committed so far. Raises OSError or `LedgerUnavailable`."""
        assert self._log is not None
        self._log.sync()

    @property
    def unsynced(self) -> bool:
        """Whether `sync` would have anything to do."""
        return self._log is not None and self._log.unsynced

    @property
    def failed(self) -> str:
        """Why nothing can be written until a restart; empty while all is well."""
        return self._log.failed if self._log is not None else ""

    def renew_log(self) -> None:
        """For a server, once at its start: see `WriteAheadLog.renew`."""
        if self._log is not None:
            with self.writing():  # nobody else writes meanwhile
                self._log.renew()

    def checkpoint(self) -> None:
        """Copy the log into the database, if much was written, so that it is begun anew. Beside
        writers; a tail that came meanwhile is copied in the next rounds."""
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
                    break
        except sqlite3.Error as error:
            self._log.note(error)
            raise
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
        """Apply a batch in one transaction: a result or exception for each, and the new entries.

        Durable on return; with `sync=False`, where the store syncs apart, only after `sync`.
        """

        def operation(connection: Connection) -> tuple[list[object], list[Entry]]:
            work = self.load(connection, commands, book, clock_ns)
            results = apply_all(work, commands)
            self.write(connection, work)
            return results, work.new_entries

        self._commands_since_checkpoint += len(commands)
        durable = sync and any(moves_money(command) for command in commands)
        applied = self._repeat(operation, partial(self._batch, durable=durable))
        if self._log is not None and not durable:
            self._log.unsynced = True
        return applied

    def load(
        self,
        connection: Connection,
        commands: Sequence[Command],
        book: PriceBook,
        clock_ns: Callable[[], int],
    ) -> Work:
        """Lock the accounts that the commands touch and read what they need."""
        keys = sorted({key for command in commands for key in keys_of(command)})
        tenants = sorted({tenant for tenant, _ in keys})
        locked = map(read_account, self._hot.find_accounts(connection, tenants))
        work = Work(book, clock_ns(), {account.tenant: account for account in locked})
        held = map(read_hold, self._hot.find_holds.by_tenant(connection, keys))
        work.holds = {hold.key: hold for hold in held}
        unheld = [key for key in keys if key not in work.holds]  # what is held was not charged
        for entry in map(read_entry, self._hot.find_entries.by_tenant(connection, unheld)):
            work.entries.setdefault((entry.tenant, entry.request_id), []).append(entry)
        drawing = sorted({tenant for each in commands if (tenant := advance_of(each))})
        if drawing:
            ahead = map(read_advance, self._hot.find_advances(connection, drawing))
            work.advances = {advance.key: advance for advance in ahead}
        retried = {key for command in commands if (key := fingerprint_of(command))}
        for fingerprint in retried:
            lost = store_undelivered.charges(connection, fingerprint, work.now_ns)
            work.undelivered[fingerprint] = lost
            for hold in store_undelivered.running(connection, fingerprint):
                work.holds.setdefault(hold.key, hold)
        planned = [tenant for tenant in tenants if book.includes(tenant)]
        if planned and any(isinstance(each, Settle | Reap) for each in commands):
            work.used = store_plans.used_by(connection, planned)
        if any(isinstance(each, MoveWallet) for each in commands):
            work.wallets = store_wallets.wallet_rows(connection, tenants)
        closing = [(each.tenant, each.month) for each in commands if isinstance(each, CloseMonth)]
        work.spent = store_plans.spent_in(connection, closing)
        for tenant in {each.tenant for each in commands if isinstance(each, Expire)}:
            work.grants[tenant] = store_expiring.grants_of(connection, tenant)
        standing = [entry for found in work.entries.values() for entry in found]
        standing += [entry for found in work.grants.values() for entry in found]
        forgiven = [entry for found in work.undelivered.values() for entry in found]
        for entry in (*standing, *forgiven):
            if entry.kind in CORRECTABLE:
                found = find_corrections(connection, entry)
                work.corrections[entry.tenant, entry.seq] = found
        return work

    def all_holds(self) -> list[StoredHold]:
        """Every hold; there are as many as requests run."""
        with self.reading() as connection:
            return [read_hold(row) for row in connection.execute(select(holds)).mappings()]

    def all_advances(self) -> list[Advance]:
        """What servers hold in advance: of each as much as there are busy tenants."""
        with self.reading() as connection:
            return [read_advance(row) for row in connection.execute(select(advances)).mappings()]

    def write(self, connection: Connection, work: Work) -> None:
        """Write what a batch changed."""
        if work.new_entries:
            self._hot.add_entries.run(connection, map(entry_row, work.new_entries))
            store_expiring.note_grants(connection, work.new_entries)
            daily, sessions = rollups(work.new_entries).stored()
            if daily:
                self._hot.add_daily.run(connection, daily)
            if sessions:
                self._hot.add_sessions.run(connection, sessions)
        if work.put_holds:
            self._hot.put_holds.run(connection, map(hold_row, work.put_holds.values()))
        if work.dropped_holds:
            self._hot.drop_holds.run(connection, map(_key_row, work.dropped_holds))
        if work.put_wallets:
            store_wallets.write_wallets(connection, work.put_wallets)
        if work.put_used:
            store_plans.write_used(connection, work.put_used)
        if work.put_advances:
            changed = work.put_advances.values()
            self._hot.put_advances.run(connection, [advance_row(a) for a in changed if a.amount])
            gone = [{"of_tenant": a.tenant, "of_owner": a.owner} for a in changed if not a.amount]
            self._hot.drop_advances.run(connection, gone)
        if work.touched:
            moved = [account_row(work.accounts[tenant]) for tenant in sorted(work.touched)]
            self._hot.move_accounts.run(connection, moved)
        for fingerprint in work.dropped_undelivered:
            store_undelivered.forget(connection, fingerprint)
        for fingerprint, request_id in work.put_undelivered:
            store_undelivered.note(connection, fingerprint, request_id, work.now_ns)
        for entry, before in work.decisions:
            _write_decision(connection, entry, before)


def find_corrections(connection: Connection, charged: Entry) -> list[Entry]:
    """The entries that correct a charge or put a deposit right."""
    query = select(entries).where(
        (entries.c.tenant == charged.tenant) & (entries.c.corrects == charged.seq)
    )
    return [read_entry(row) for row in connection.execute(query).mappings()]


def _write_decision(connection: Connection, entry: Entry, worth: int) -> None:
    """The trail of a deposit, grant or correction that a person decided."""
    details = entry.details
    wallet = {"wallet": told(details)} if told(details) else {}
    add_trail(
        connection,
        at_ns=entry.at_ns,
        actor=details["by"],
        action=f"balance.{entry.kind}",
        subject=f"{entry.tenant}/{entry.seq}",
        before={"balance": format_units(worth)},
        after={"balance": format_units(worth + entry.amount)} | wallet,
        reason=details.get("reason", ""),
    )


def _key_row(key: tuple[str, str]) -> dict[str, str]:
    return {"old_tenant": key[0], "old_request_id": key[1]}
