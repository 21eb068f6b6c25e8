"""A ledger on each kind of database, for the suites that both must pass."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from billing import audit, store_reports
from billing.entries import Entry
from billing.store import LedgerStore
from billing.testing import TestLedger, running_ledger
from tests.postgres_server import fresh_database, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    else:
        with fresh_database(request.getfixturevalue("postgres")) as database:
            yield database


@pytest.fixture
def house(url: str) -> Iterator[TestLedger]:
    """A running ledger; whatever a test did to it, it proves afterwards."""
    with running_ledger(url) as house:
        yield house
        proof = audit.verify(house.ledger.store)
        assert proof.problems == []


def entries(store: LedgerStore, tenant: str = "acme") -> list[Entry]:
    with store.reading() as connection:
        return list(store_reports.stream_entries(connection, tenant))
