"""A ledger whose tables another version made is refused, and closed if it changes meanwhile."""

import pytest
import sqlalchemy as sa

from billing.errors import LedgerUnavailable, StoreError
from billing.gate.outcomes import Outcome
from billing.money import UNITS
from billing.store.opening import open_store
from billing.store.schema import holds
from tests.patience import until
from tests.support.billing import USAGE, running_ledger

NEWER = sa.text("UPDATE meta SET value = :newer WHERE name = 'schema'").bindparams(newer=b"9999")
UNNUMBERED = sa.text("DELETE FROM meta WHERE name = 'schema'")
WITHOUT_META = sa.text("DROP TABLE meta")


@pytest.mark.parametrize(
    ("change", "named"), [(NEWER, "9999"), (UNNUMBERED, "unnumbered"), (WITHOUT_META, "unnumbered")]
)
def test_a_ledger_of_another_version_is_refused(url, change, named):
    open_store(url).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(change)
    engine.dispose()
    with pytest.raises(StoreError, match=f"'{named}', which this version does not know"):
        open_store(url)


def test_a_server_writes_nothing_once_a_newer_version_has_migrated_its_ledger(url):
    """Two servers, one database, and only one of them was upgraded."""
    with running_ledger(url) as house:
        house.fund(UNITS)
        running = house.reserve("running", 0)
        with house.ledger.store.writing() as connection:
            connection.execute(NEWER)
        until(lambda: house.ledger.store.failed)
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
def test_an_invalid_database_url_is_shown_without_its_password(url):
    with pytest.raises(StoreError, match=r"'\*\*\*@host.*' is not a database URL") as raised:
        open_store(url)
    assert "heim" not in str(raised.value)
