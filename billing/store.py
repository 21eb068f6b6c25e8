"""The ledger's database: opening, migrating, and the one transaction that applies a batch.

SQLAlchemy Core on SQLite (WAL) or PostgreSQL. `LedgerStore` is shared: its writer methods are
called by the ledger thread, by admin operations and by the CLI; each is one transaction. Readers
take any thread. Several processes may share one database: SQLite admits one writer at a time, on
PostgreSQL a transaction locks the accounts it touches in order of their names, so balances never
race.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import orjson
from sqlalchemy import (
    Connection,
    Engine,
    bindparam,
    create_engine,
    delete,
    event,
    inspect,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import RowMapping, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from billing.entries import ACCOUNTS, Entry, Kind
from billing.errors import LedgerUnavailable, StoreError
from billing.gate import Account, Command, Reserve, TopUp, Work, apply_all, fingerprint_of, keys_of
from billing.holds import StoredHold
from billing.money import format_units
from billing.prices import PriceBook
from billing.rollups import COUNTERS, DAILY_KEY, SESSION_KEY, rollups
from billing.store_schema import (
    accounts,
    entries,
    holds,
    undelivered,
    usage_daily,
    usage_sessions,
)
from billing.store_trail import add_trail
from billing.usage import Usage

__all__ = ["Connection", "LedgerStore", "database_url", "open_store"]

T = TypeVar("T")

REVISION = "0001"
MIGRATIONS = Path(__file__).parent / "store_migrations"
RETRIES = 8  # of a transaction that another process made fail
BUSY_TIMEOUT_S = 10


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
        _migrate(engine)
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
    options = connection.get_execution_options()
    if options.get("writes"):
        # Entries survive a power cut. Holds need not: neither do the requests they belong to.
        level = "FULL" if options.get("durable", True) else "NORMAL"
        connection.exec_driver_sql(f"PRAGMA synchronous={level}")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.exec_driver_sql("BEGIN")


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
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
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
        insert = postgresql.insert if engine.dialect.name == "postgresql" else sqlite.insert
        self.insert: Callable[..., Any] = insert
        self._add_daily = _adding(insert, usage_daily, DAILY_KEY)
        self._add_session = _adding(insert, usage_sessions, SESSION_KEY, last="last_ns")
        self._put_hold = _replacing(insert, holds, ("tenant", "request_id"))

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A consistent read-only view."""
        with self.engine.connect() as connection, connection.begin():
            if self.engine.dialect.name == "postgresql":
                connection.execute(
                    text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                )
            yield connection

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[Connection]:
        """One write transaction; commits at the end, to disk if `durable`."""
        connection = self.engine.connect().execution_options(writes=True, durable=durable)
        with connection, connection.begin():
            yield connection

    def retrying(self, operation: Callable[[Connection], T], *, durable: bool = True) -> T:
        """Run `operation` in a transaction, again when another process made it fail.

        Raises `LedgerUnavailable` when the store cannot be written.
        """
        for attempt in range(RETRIES):
            try:
                with self.writing(durable=durable) as connection:
                    return operation(connection)
            except OperationalError as error:  # locked, deadlock, serialisation, lost connection
                if attempt == RETRIES - 1:
                    raise LedgerUnavailable(f"the ledger is busy: {_cause(error)}") from error
                time.sleep(0.002 * 2**attempt)
            except DBAPIError as error:
                raise LedgerUnavailable(f"the ledger cannot be written: {_cause(error)}") from error
        raise AssertionError("unreachable")

    def apply(
        self, commands: Sequence[Command], book: PriceBook, clock_ns: Callable[[], int]
    ) -> tuple[list[object], list[Entry]]:
        """Apply a batch in one transaction: a result or exception for each, and the new entries."""

        def operation(connection: Connection) -> tuple[list[object], list[Entry]]:
            work = self.load(connection, commands, book, clock_ns)
            results = apply_all(work, commands)
            self.write(connection, work)
            return results, work.new_entries

        moves_money = not all(isinstance(command, Reserve | TopUp) for command in commands)
        return self.retrying(operation, durable=moves_money)

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
        locked = lock_accounts(connection, tenants)
        work = Work(book, clock_ns(), locked)
        work.holds = {hold.key: hold for hold in _find_holds(connection, keys)}
        for entry in _find_entries(connection, keys):
            work.entries.setdefault((entry.tenant, entry.request_id), []).append(entry)
        retried = {key for command in commands if (key := fingerprint_of(command))}
        for fingerprint in retried:
            work.undelivered[fingerprint] = _find_undelivered(connection, fingerprint)
        standing = [entry for found in work.entries.values() for entry in found]
        forgiven = [entry for found in work.undelivered.values() for entry in found]
        for entry in (*standing, *forgiven):
            if entry.kind is Kind.CHARGE:
                found = find_corrections(connection, entry)
                work.corrections[entry.tenant, entry.seq] = found
        return work

    def all_holds(self) -> list[StoredHold]:
        """Every hold; there are as many as requests run."""
        with self.reading() as connection:
            return [read_hold(row) for row in connection.execute(select(holds)).mappings()]

    def write(self, connection: Connection, work: Work) -> None:
        """Write what a batch changed."""
        if work.new_entries:
            connection.execute(entries.insert(), [entry_row(entry) for entry in work.new_entries])
            daily, sessions = rollups(work.new_entries).stored()
            if daily:
                connection.execute(self._add_daily, daily)
            if sessions:
                connection.execute(self._add_session, sessions)
        if work.put_holds:
            connection.execute(self._put_hold, [_hold_row(h) for h in work.put_holds.values()])
        if work.dropped_holds:
            connection.execute(_DROP_HOLD, [_key_row(key) for key in work.dropped_holds])
        if work.touched:
            rows = [_account_row(work.accounts[tenant]) for tenant in sorted(work.touched)]
            connection.execute(_MOVE_ACCOUNT, rows)
        self._write_undelivered(connection, work)
        for entry, before in work.decisions:
            _write_decision(connection, entry, before)

    def _write_undelivered(self, connection: Connection, work: Work) -> None:
        for tenant, fingerprint, request_id in work.put_undelivered:
            values = {"tenant": tenant, "fingerprint": fingerprint, "request_id": request_id}
            connection.execute(undelivered.insert(), values | {"at_ns": work.now_ns})
        for tenant, fingerprint in work.dropped_undelivered:
            gone = (undelivered.c.tenant == tenant) & (undelivered.c.fingerprint == fingerprint)
            connection.execute(undelivered.delete().where(gone))


# Built once: a statement that is made anew each time costs more than its execution.
_LOCK_ACCOUNTS = (
    select(accounts)
    .where(accounts.c.tenant.in_(bindparam("tenants", expanding=True)))
    .order_by(accounts.c.tenant)
    .with_for_update()
)
_FIND_HOLDS = select(holds).where(
    tuple_(holds.c.tenant, holds.c.request_id).in_(bindparam("pairs", expanding=True))
)
_FIND_ENTRIES = select(entries).where(
    tuple_(entries.c.tenant, entries.c.request_id).in_(bindparam("pairs", expanding=True))
)


def lock_accounts(connection: Connection, tenants: Sequence[str]) -> dict[str, Account]:
    """The accounts of these tenants, locked until the transaction ends, always in one order."""
    found = connection.execute(_LOCK_ACCOUNTS, {"tenants": tenants})
    return {row["tenant"]: read_account(row) for row in found.mappings()}


def read_account(row: RowMapping) -> Account:
    return Account(
        tenant=row["tenant"],
        currency=row["currency"],
        credit_limit=row["credit_limit"],
        suspended=row["suspended"],
        head=row["head"],
        seq=row["seq"],
        at_ns=row["at_ns"],
        held=row["held"],
        balances={name: row[name] for name in ACCOUNTS},
    )


def _find_holds(connection: Connection, keys: Sequence[tuple[str, str]]) -> Iterable[StoredHold]:
    return map(read_hold, connection.execute(_FIND_HOLDS, {"pairs": keys}).mappings())


def read_hold(row: RowMapping) -> StoredHold:
    return StoredHold(
        tenant=row["tenant"],
        request_id=row["request_id"],
        amount=row["amount"],
        expires_ns=row["expires_ns"],
        owner=row["owner"],
        boot=row["boot"],
        body=row["body"],
        usage=Usage.from_record(orjson.loads(row["usage"])),
    )


def _find_entries(connection: Connection, keys: Sequence[tuple[str, str]]) -> Iterable[Entry]:
    return map(read_entry, connection.execute(_FIND_ENTRIES, {"pairs": keys}).mappings())


def find_corrections(connection: Connection, charged: Entry) -> list[Entry]:
    """The entries that correct a charge."""
    query = select(entries).where(
        (entries.c.tenant == charged.tenant) & (entries.c.corrects == charged.seq)
    )
    return [read_entry(row) for row in connection.execute(query).mappings()]


def _find_undelivered(connection: Connection, key: tuple[str, str]) -> list[Entry]:
    tenant, fingerprint = key
    wanted = select(undelivered.c.request_id).where(
        (undelivered.c.tenant == tenant) & (undelivered.c.fingerprint == fingerprint)
    )
    query = select(entries).where(
        (entries.c.tenant == tenant)
        & entries.c.request_id.in_(wanted)
        & (entries.c.kind == Kind.CHARGE)
    )
    return [read_entry(row) for row in connection.execute(query).mappings()]


def read_entry(row: RowMapping) -> Entry:
    return Entry(
        tenant=row["tenant"],
        seq=row["seq"],
        kind=Kind(row["kind"]),
        request_id=row["request_id"],
        at_ns=row["at_ns"],
        currency=row["currency"],
        postings=row["postings"],
        body=row["body"],
        hash=row["hash"],
    )


def entry_row(entry: Entry) -> dict[str, Any]:
    corrects = entry.details["corrects"] if entry.kind is Kind.CORRECTION else None
    return {
        "tenant": entry.tenant,
        "seq": entry.seq,
        "kind": entry.kind.value,
        "request_id": entry.request_id,
        "at_ns": entry.at_ns,
        "currency": entry.currency,
        "postings": entry.postings,
        "body": entry.body,
        "hash": entry.hash,
        "corrects": corrects,
    }


def _write_decision(connection: Connection, entry: Entry, worth: int) -> None:
    """The trail of a deposit, grant or correction that a person decided."""
    details = entry.details
    add_trail(
        connection,
        at_ns=entry.at_ns,
        actor=details["by"],
        action=f"balance.{entry.kind}",
        subject=f"{entry.tenant}/{entry.seq}",
        before={"balance": format_units(worth)},
        after={"balance": format_units(worth + entry.amount)},
        reason=details.get("reason", ""),
    )


def _hold_row(hold: StoredHold) -> dict[str, Any]:
    return {
        "tenant": hold.tenant,
        "request_id": hold.request_id,
        "amount": hold.amount,
        "expires_ns": hold.expires_ns,
        "owner": hold.owner,
        "boot": hold.boot,
        "body": hold.body,
        "usage": orjson.dumps(hold.usage.record()).decode(),
    }


def _key_row(key: tuple[str, str]) -> dict[str, str]:
    return {"old_tenant": key[0], "old_request_id": key[1]}


def _account_row(account: Account) -> dict[str, Any]:
    return {
        "of_tenant": account.tenant,
        "held": account.held,
        "seq": account.seq,
        "at_ns": account.at_ns,
        "head": account.head,
        **account.balances,
    }


_DROP_HOLD = delete(holds).where(
    (holds.c.tenant == bindparam("old_tenant"))
    & (holds.c.request_id == bindparam("old_request_id"))
)
_MOVE_ACCOUNT = (
    update(accounts)
    .where(accounts.c.tenant == bindparam("of_tenant"))
    .values({name: bindparam(name) for name in (*ACCOUNTS, "held", "seq", "at_ns", "head")})
)


def _adding(insert: Callable[..., Any], table: Any, key: Sequence[str], last: str = "") -> Any:
    """An upsert that adds the counters of a rollup row to those that stand."""
    statement = insert(table)
    new = statement.excluded
    changes: dict[str, Any] = {name: table.c[name] + new[name] for name in COUNTERS}
    if last:
        changes[last] = new[last]
    return statement.on_conflict_do_update(index_elements=list(key), set_=changes)


def _replacing(insert: Callable[..., Any], table: Any, key: Sequence[str]) -> Any:
    """An upsert that replaces a row."""
    statement = insert(table)
    changes = {c.name: statement.excluded[c.name] for c in table.c if c.name not in key}
    return statement.on_conflict_do_update(index_elements=list(key), set_=changes)
