"""Opening the ledger's database by its URL: its dialect, its pragmas, its schema.

Called once by a server or a command. An empty database gets today's schema under a lock. Another
version's is refused.
"""

import os
import sqlite3
from glob import escape
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from billing.errors import StoreError
from billing.store.schema import SCHEMA, append_only_statements, meta, metadata, use_postgresql
from billing.store.store import SCHEMA_ROW, LedgerStore, cause_of

BUSY_TIMEOUT_S = 10
# Page cache of each of a server's up to 15 connections. SQLite keeps pages until it is full: with
# 64 MiB the memory grew with the ledger. The operating system caches them too.
CACHE_KIB = 4 << 10


def database_url(data_dir: Path) -> str:
    """The default database of a data directory."""
    return f"sqlite:///{data_dir / 'ledger.sqlite3'}"


def open_store(url: str, *, create: bool = True) -> LedgerStore:
    """Opens a database, and creates its schema if it is empty. Raises `StoreError`.

    `create=False`, for reading commands, refuses a SQLite file that does not exist.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        shown = "***@" + url.rpartition("@")[2] if "@" in url else url  # without its password
        raise StoreError(
            f"{shown!r} is not a database URL such as sqlite:///ledger.sqlite3"
        ) from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(f"{parsed.get_backend_name()} is not supported; use SQLite or PostgreSQL")
    is_file = parsed.get_backend_name() == "sqlite" and _is_file(parsed.database, create)
    try:
        engine = _engine(parsed)
        try:
            _check_schema(engine, is_file)
        except BaseException:
            engine.dispose()
            raise
    except ModuleNotFoundError as error:
        raise StoreError('PostgreSQL needs a driver: pip install "cachesvc[postgres]"') from error
    except SQLAlchemyError as error:
        where = parsed.render_as_string(hide_password=True)
        said = f"cannot open the ledger at {where}: {cause_of(error)}"
        raise StoreError(said + _hint(parsed)) from error
    return LedgerStore(engine)


def _is_file(path: str | None, create: bool) -> bool:
    """Whether SQLite's file is there already. Raises `StoreError` if it must be, or cannot be."""
    if not path or path == ":memory:":
        raise StoreError("a ledger needs a file: sqlite:////path/to/ledger.sqlite3")
    if not create and not Path(path).exists():
        raise StoreError(f"there is no ledger at {path}; start the server or create a tenant first")
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.exists()


def _hint(url: URL) -> str:
    """What SQLite does not say of a snapshot, or of another user's folder."""
    folder = Path(url.database or "").parent
    if url.get_backend_name() != "sqlite" or os.access(folder, os.W_OK):
        return ""
    return f"; SQLite writes beside the ledger, also to read it, and {folder} cannot be written"


def _engine(url: Any) -> Engine:
    if url.get_backend_name() == "postgresql":
        use_postgresql()
        return create_engine(url, pool_size=4, max_overflow=8, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # we send BEGIN ourselves
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
    connection.execute("PRAGMA wal_autocheckpoint=4000")


def _begin_sqlite(connection: Connection) -> None:
    """Begins a transaction on the driver directly, because Core would take longer than a batch."""
    driver: Any = connection.connection.driver_connection
    durable = connection.get_execution_options().get("durable", connection.info.get("durable"))
    if durable is None:
        driver.execute("BEGIN")
        return
    # Entries survive a power cut. Holds need not, because their requests do not either.
    level = "FULL" if durable else "NORMAL"
    if connection.info.get("synchronous") != level:
        driver.execute(f"PRAGMA synchronous={level}")
        connection.info["synchronous"] = level
    driver.execute("BEGIN IMMEDIATE")


def _check_schema(engine: Engine, is_file: bool) -> None:
    """Creates the schema in an empty database, under a lock. Refuses another version's.

    `is_file` says whether this is the file of a ledger that was there before.
    """
    with engine.connect() as connection:
        found = _schema(connection)
    if found is None and is_file:
        _check_never_used(Path(str(engine.url.database)))
    if found is None:
        with engine.connect().execution_options(durable=True) as connection, connection.begin():
            if engine.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(4715013)"))
            found = _schema(connection) or _create(connection)
    if found != SCHEMA:
        raise StoreError(
            f"the ledger has schema {found!r}, which this version does not know; run the version "
            "that wrote it, or a newer one"
        )


def _create(connection: Connection) -> str:
    metadata.create_all(connection)
    for statement in append_only_statements(connection.dialect.name):
        connection.execute(text(statement))
    connection.execute(meta.insert().values(name=SCHEMA_ROW, value=SCHEMA.encode()))
    return SCHEMA


def _check_never_used(file: Path) -> None:
    """Raises `StoreError` if a server has run on this file without tables: it had some then.

    As when the log was removed, and the server killed before it had copied that into the file.
    """
    if any(file.parent.glob(f"{escape(file.name)}-*.lock")):
        raise StoreError(
            f"the ledger at {file} is empty, though a server has run on it: its contents are lost. "
            "Restore it from a copy; or remove the file, and a new ledger begins, in which there "
            "are no tenants, keys or balances"
        )


def _schema(connection: Connection) -> str | None:
    """The schema's version; None in an empty database."""
    if not inspect(connection).has_table("accounts"):
        return None
    found: bytes | None = None
    if inspect(connection).has_table("meta"):
        found = connection.scalar(select(meta.c.value).where(meta.c.name == SCHEMA_ROW))
    return found.decode() if found else "unnumbered"
