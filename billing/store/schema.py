"""The tables of the ledger's database, the same on SQLite and PostgreSQL.

Amounts that may exceed 64 bits (9.2 million of the currency) are `Wide`; rollups add in SQL and
keep `hi * 10**9 + lo`, so that no sum overflows.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Table,
    Text,
    false,
    text,
)
from sqlalchemy.types import TypeDecorator, TypeEngine

from billing.gate.entries import ACCOUNTS
from billing.gate.rollups import COUNTERS, DAILY_KEY, SESSION_KEY


class Wide(TypeDecorator[int]):
    """A whole number of any size: NUMERIC(38, 0) on PostgreSQL, decimal text on SQLite."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        wide: TypeEngine[Any] = Numeric(38, 0) if dialect.name == "postgresql" else Text()
        return dialect.type_descriptor(wide)

    def process_bind_param(self, value: int | None, dialect: Dialect) -> Any:
        if value is None or dialect.name == "postgresql":
            return value
        return str(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:
        return None if value is None else int(value)


SCHEMA = "3"  # the version of these tables; another's database is refused

metadata = MetaData()


def _keys(*names: str) -> list[Column[Any]]:
    """Columns of texts that are the primary key, or begin it."""
    return [Column(name, String, primary_key=True) for name in names]


def _needed(kind: Any, *names: str, **rest: Any) -> list[Column[Any]]:
    """Columns of one type that are never null."""
    return [Column(name, kind, nullable=False, **rest) for name in names]


meta = Table("meta", metadata, *_keys("name"), *_needed(LargeBinary, "value"))

accounts = Table(
    "accounts",
    metadata,
    *_keys("tenant"),
    *_needed(String(3), "currency"),
    Column("credit_limit", Wide),  # null: unlimited
    *_needed(Boolean, "suspended"),
    *_needed(Boolean, "limited", server_default=false()),  # has hard limits
    *_needed(BigInteger, "created_ns"),
    # Projections of entries and holds; rebuilt by `ledger verify --rebuild`.
    *_needed(Wide, *ACCOUNTS, "held"),
    *_needed(BigInteger, "seq", "at_ns"),
    *_needed(LargeBinary(32), "head"),
)

# Has rowids on purpose: without them and without statistics, SQLite would look up a request id by
# scanning the tenant's primary key.
entries = Table(
    "entries",
    metadata,
    *_keys("tenant"),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    *_needed(String, "kind", "request_id"),
    *_needed(BigInteger, "at_ns"),
    *_needed(String(3), "currency"),
    *_needed(Text, "postings", "body"),
    *_needed(LargeBinary(32), "hash"),
    Column("corrects", BigInteger),  # a copy from the body, to be found by
    Column("billed_ns", BigInteger),  # likewise; null: it is `at_ns`
)
Index("entries_once", entries.c.tenant, entries.c.request_id, entries.c.kind, unique=True)
for _name, _column, _where in (
    ("rare", entries.c.at_ns, "kind <> 'charge'"),
    ("corrects", entries.c.corrects, "corrects IS NOT NULL"),
    ("billed", entries.c.billed_ns, "billed_ns IS NOT NULL"),
):
    Index(f"entries_{_name}", entries.c.tenant, _column, sqlite_where=text(_where))

holds = Table(
    "holds",
    metadata,
    *_keys("tenant", "request_id"),
    *_needed(Wide, "amount"),
    *_needed(BigInteger, "expires_ns", index=True),
    *_needed(String, "owner", "boot"),
    *_needed(Text, "body", "usage"),
    *_needed(Text, "checked", server_default=""),  # under which hard limits
)

# Limits of a tenant set by an admin; others are the settings'. 0 is no limit.
rate_limits = Table(
    "rate_limits", metadata, *_keys("tenant", "name"), *_needed(BigInteger, "value")
)

usage_daily = Table(
    "usage_daily",
    metadata,
    *(
        Column(name, Integer if name == "day" else String, primary_key=True, autoincrement=False)
        for name in DAILY_KEY
    ),
    *_needed(BigInteger, *COUNTERS),
)

usage_sessions = Table(
    "usage_sessions", metadata, *_keys(*SESSION_KEY), *_needed(BigInteger, *COUNTERS, "last_ns")
)

undelivered = Table(
    "undelivered",
    metadata,
    *_keys("tenant", "fingerprint", "request_id"),
    *_needed(BigInteger, "at_ns"),
)

rate_cards = Table(
    "rate_cards",
    metadata,
    *_keys("name", "version"),
    *_needed(BigInteger, "valid_from_ns", "applied_ns"),
    *_needed(String(64), "digest"),
    *_needed(Text, "text"),
)

projects = Table(
    "projects", metadata, *_keys("tenant", "project"), *_needed(BigInteger, "created_ns")
)

keys = Table(
    "keys",
    metadata,
    *_keys("key_id"),
    *_needed(String, "tenant", index=True),
    *_needed(String, "project", "name", "prefix"),
    *_needed(LargeBinary(32), "digest", unique=True),
    *_needed(String, "scopes"),
    *_needed(BigInteger, "created_ns"),
    Column("expires_ns", BigInteger),
    Column("revoked_ns", BigInteger),
)

trail = Table(
    "trail",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    *_needed(BigInteger, "at_ns"),
    *_needed(String, "actor", "action", "subject"),
    *_needed(Text, "before", "after", "reason"),
    *_needed(LargeBinary(32), "hash"),
)

idempotency = Table(
    "idempotency",
    metadata,
    *_keys("tenant", "key"),
    *_needed(String(64), "body_digest"),
    *_needed(String, "request_id"),
    Column("status", Integer),  # null while the first request runs
    Column("response", LargeBinary),
    *_needed(BigInteger, "expires_ns", index=True),
    *_needed(String, "owner", "boot", server_default=""),  # who took it, in which run
)

export_cursors = Table(
    "export_cursors", metadata, *_keys("name", "tenant"), *_needed(BigInteger, "seq")
)

budgets = Table(
    "budgets",
    metadata,
    *_keys("name"),
    *_needed(String, "tenant"),
    *_needed(Wide, "amount"),
    *_needed(String, "per", "of", "value"),
    # The beginning of its first period, and its decision's number in the trail.
    *_needed(BigInteger, "since_ns", "version"),
)

# What hard limits count: charges minus refunds, and the holds of running requests.
spending = Table(
    "spending", metadata, *_keys("budget", "period", "value"), *_needed(Wide, "charged", "held")
)

# Grants that have yet to expire, for the sweeper.
expiring = Table(
    "expiring",
    metadata,
    *_keys("tenant"),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    *_needed(String, "reference"),
    *_needed(BigInteger, "expires_ns", index=True),
)

APPEND_ONLY = ("entries", "trail")


def append_only_statements(dialect: str) -> list[str]:
    """DDL that makes the database itself refuse updates and deletes of written rows."""
    if dialect == "sqlite":
        return [
            f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} BEGIN "
            f"SELECT RAISE(ABORT, '{table} are append-only'); END"
            for table in APPEND_ONLY
            for verb in ("UPDATE", "DELETE")
        ]
    function = (
        "CREATE OR REPLACE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% are append-only', TG_TABLE_NAME; END $$"
    )
    return [
        function,
        *(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION refuse_change()"
            for table in APPEND_ONLY
        ),
    ]


def use_postgresql() -> None:
    """Makes indexes partial on PostgreSQL too, before its tables are created or compared.

    Set in the index itself, `postgresql_where` would import that dialect in every command.
    """
    for table in metadata.tables.values():
        for index in table.indexes:
            options = index.dialect_options
            options["postgresql"]["where"] = options["sqlite"]["where"]
