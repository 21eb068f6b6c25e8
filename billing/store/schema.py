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


SCHEMA = "1"  # the version of these tables; another's database is refused

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("name", String, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

accounts = Table(
    "accounts",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("currency", String(3), nullable=False),
    Column("credit_limit", Wide),  # null: unlimited
    Column("suspended", Boolean, nullable=False),
    Column("limited", Boolean, nullable=False, server_default=false()),  # has hard limits
    Column("created_ns", BigInteger, nullable=False),
    # Projections of entries and holds; rebuilt by `ledger verify --rebuild`.
    Column("granted", Wide, nullable=False),
    Column("topup", Wide, nullable=False),
    Column("receivable", Wide, nullable=False),
    Column("revenue", Wide, nullable=False),
    Column("cash", Wide, nullable=False),
    Column("promotion", Wide, nullable=False),
    Column("held", Wide, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("at_ns", BigInteger, nullable=False),
    Column("head", LargeBinary(32), nullable=False),
)

# Has rowids on purpose: without them and without statistics, SQLite would look up a request id by
# scanning the tenant's primary key.
entries = Table(
    "entries",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("request_id", String, nullable=False),
    Column("at_ns", BigInteger, nullable=False),
    Column("currency", String(3), nullable=False),
    Column("postings", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("hash", LargeBinary(32), nullable=False),
    Column("corrects", BigInteger),  # a copy from the body, to be found by
    Column("billed_ns", BigInteger),  # likewise; null: it is `at_ns`
)
Index("entries_once", entries.c.tenant, entries.c.request_id, entries.c.kind, unique=True)
_RARE = text("kind <> 'charge'")
Index(
    "entries_rare",
    entries.c.tenant,
    entries.c.at_ns,
    sqlite_where=_RARE,
)
_CORRECTS = text("corrects IS NOT NULL")
Index(
    "entries_corrects",
    entries.c.tenant,
    entries.c.corrects,
    sqlite_where=_CORRECTS,
)
_BILLED = text("billed_ns IS NOT NULL")
Index(
    "entries_billed",
    entries.c.tenant,
    entries.c.billed_ns,
    sqlite_where=_BILLED,
)

holds = Table(
    "holds",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("request_id", String, primary_key=True),
    Column("amount", Wide, nullable=False),
    Column("expires_ns", BigInteger, nullable=False, index=True),
    Column("owner", String, nullable=False),
    Column("boot", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("usage", Text, nullable=False),
    Column("checked", Text, nullable=False, server_default=""),  # under which hard limits
)

# Limits of a tenant set by an admin; others are the settings'. 0 is no limit.
rate_limits = Table(
    "rate_limits",
    metadata,
    *(Column(name, String, primary_key=True) for name in ("tenant", "name")),
    Column("value", BigInteger, nullable=False),
)


def _counters() -> list[Column[Any]]:
    return [Column(name, BigInteger, nullable=False) for name in COUNTERS]


usage_daily = Table(
    "usage_daily",
    metadata,
    *(
        Column(name, Integer if name == "day" else String, primary_key=True, autoincrement=False)
        for name in DAILY_KEY
    ),
    *_counters(),
)

usage_sessions = Table(
    "usage_sessions",
    metadata,
    *(Column(name, String, primary_key=True) for name in SESSION_KEY),
    *_counters(),
    Column("last_ns", BigInteger, nullable=False),
)

undelivered = Table(
    "undelivered",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("fingerprint", String, primary_key=True),
    Column("request_id", String, primary_key=True),
    Column("at_ns", BigInteger, nullable=False),
)

rate_cards = Table(
    "rate_cards",
    metadata,
    Column("name", String, primary_key=True),
    Column("version", String, primary_key=True),
    Column("valid_from_ns", BigInteger, nullable=False),
    Column("applied_ns", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("text", Text, nullable=False),
)

projects = Table(
    "projects",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("project", String, primary_key=True),
    Column("created_ns", BigInteger, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("key_id", String, primary_key=True),
    Column("tenant", String, nullable=False, index=True),
    Column("project", String, nullable=False),
    Column("name", String, nullable=False),
    Column("prefix", String, nullable=False),
    Column("digest", LargeBinary(32), nullable=False, unique=True),
    Column("scopes", String, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    Column("expires_ns", BigInteger),
    Column("revoked_ns", BigInteger),
)

trail = Table(
    "trail",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ns", BigInteger, nullable=False),
    Column("actor", String, nullable=False),
    Column("action", String, nullable=False),
    Column("subject", String, nullable=False),
    Column("before", Text, nullable=False),
    Column("after", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("hash", LargeBinary(32), nullable=False),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("body_digest", String(64), nullable=False),
    Column("request_id", String, nullable=False),
    Column("status", Integer),  # null while the first request runs
    Column("response", LargeBinary),
    Column("expires_ns", BigInteger, nullable=False, index=True),
    Column("owner", String, nullable=False, server_default=""),  # who took it, in which run
    Column("boot", String, nullable=False, server_default=""),
)

export_cursors = Table(
    "export_cursors",
    metadata,
    Column("name", String, primary_key=True),
    Column("tenant", String, primary_key=True),
    Column("seq", BigInteger, nullable=False),
)

budgets = Table(
    "budgets",
    metadata,
    Column("name", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("amount", Wide, nullable=False),
    Column("span", String, nullable=False),
    Column("of", String, nullable=False),
    Column("value", String, nullable=False),
    # The beginning of its first period, and its decision's number in the trail.
    Column("since_ns", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
)

# What hard limits count: charges minus refunds, and the holds of running requests.
spending = Table(
    "spending",
    metadata,
    Column("budget", String, primary_key=True),
    Column("period", String, primary_key=True),
    Column("value", String, primary_key=True),
    Column("charged", Wide, nullable=False),
    Column("held", Wide, nullable=False),
)

# Grants that have yet to expire, for the sweeper.
expiring = Table(
    "expiring",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("reference", String, nullable=False),
    Column("expires_ns", BigInteger, nullable=False, index=True),
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
