"""A ledger of an older version, with entries in it, becomes what a new one is."""

import time

import pytest
import sqlalchemy as sa

from billing.errors import LedgerUnavailable, StoreError
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome
from billing.money import UNITS
from billing.proof import audit
from billing.store.opening import REVISION, open_store
from billing.store.schema import INVOICE_TABLES, holds
from billing.usage import Usage
from tests.support.billing import running_ledger

USAGE = Usage(hit_disk=900, miss=100, output=7)
AFTERWARDS = (  # tables that the first schema had not
    *("budgets", "outbox", "expiring", "refused_events", "advances", "included_used", "wallets"),
    *("rate_limits", "scoped_grants", "spending", *INVOICE_TABLES),
)
_SUMS = ("fees", "granted", "owed", "included")
_SUMMED = (
    *(f"{name}_{part}" for name in _SUMS for part in ("hi", "lo")),
    *("cache_write_1h", "storage_token_minutes", "explicit_hit", "explicit_write"),
)
ADDED = {  # and columns
    "idempotency": ("owner", "boot"),
    "entries": ("billed_ns",),
    "usage_daily": _SUMMED,
    "usage_sessions": _SUMMED,
    "accounts": ("scoped", "limited"),
    "holds": ("checked",),
}

Columns = dict[str, set[tuple[str, str, bool]]]


def columns(engine: sa.Engine) -> Columns:
    found = sa.inspect(engine)
    return {
        table: {(c["name"], str(c["type"]), bool(c["nullable"])) for c in found.get_columns(table)}
        for table in found.get_table_names()
    }


def make_old(engine: sa.Engine) -> None:
    """What the first version wrote."""
    with engine.begin() as connection:
        for table in AFTERWARDS:
            connection.execute(sa.text(f"DROP TABLE {table}"))
        connection.execute(sa.text("DROP INDEX entries_billed"))
        for table, names in ADDED.items():
            for name in names:
                connection.execute(sa.text(f"ALTER TABLE {table} DROP COLUMN {name}"))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0001'"))


def test_a_ledger_of_the_first_schema_is_brought_up_to_date(url: str) -> None:
    with running_ledger(url) as house:
        house.fund(UNITS)
        house.charge("r1", USAGE, session="s")
        house.ledger.correct("acme", "r1", reference="c", by="ops", reason="", amount=5).result()
        today = columns(house.ledger.store.engine)
        worth = house.ledger.balance("acme").balance
    engine = sa.create_engine(url)
    try:
        make_old(engine)
        before = columns(engine)
        assert before != today
    finally:
        engine.dispose()
    with running_ledger(url) as house:
        assert today == columns(house.ledger.store.engine)
        assert worth == house.ledger.balance("acme").balance
        assert audit.verify(house.ledger.store).problems == []
        house.charge("r2", USAGE, session="s")
        grant = {"reference": "g", "by": "ops", "scope": ["*"]}
        house.ledger.post(Deposit("acme", Kind.GRANT, amount=5, **grant)).result()
        house.charge("r3", USAGE)
        proof = audit.verify(house.ledger.store)
        assert (6, []) == (proof.num_entries, proof.problems)


def test_a_ledger_of_a_newer_version_is_refused(url: str) -> None:
    open_store(url).close()
    engine = sa.create_engine(url)
    newer = f"{int(REVISION) + 1:04}"
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE alembic_version SET version_num = '{newer}'"))
    engine.dispose()
    with pytest.raises(StoreError, match=f"'{newer}', which this version does not know"):
        open_store(url)


def test_a_server_writes_nothing_once_a_newer_version_has_migrated_its_ledger(url: str) -> None:
    """Two servers, one database, and only one of them was upgraded."""
    with running_ledger(url) as house:
        house.fund(UNITS)
        running = house.reserve("running", 0)
        with house.ledger.store.writing() as connection:
            connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        give_up = time.monotonic() + 60
        while not house.ledger.store.failed:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        assert "start this server again with that version" in house.ledger.refuses
        with pytest.raises(LedgerUnavailable, match="to 9999"):
            house.reserve("r1", 0)
        with pytest.raises(LedgerUnavailable, match="to 9999"):
            house.ledger.settle(running, USAGE, Outcome.FINISHED).result(10)
        with pytest.raises(LedgerUnavailable, match="to 9999"):
            house.accounts.create_tenant("other", "CNY", by="ops")
        with house.ledger.store.reading() as connection:
            assert ["running"] == list(connection.scalars(sa.select(holds.c.request_id)))


@pytest.mark.parametrize("url", ["postgresql:/me:geheim@host/db", "me:ge@heim@host"])
def test_an_invalid_database_url_is_shown_without_its_password(url: str) -> None:
    with pytest.raises(StoreError, match=r"'\*\*\*@host.*' is not a database URL") as raised:
        open_store(url)
    assert "heim" not in str(raised.value)
