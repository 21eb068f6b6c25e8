"""Fixtures: a ledger's database of each kind, for the suites that both must pass."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from billing.store.opening import open_store
from tests.postgres_server import fresh_database, postgres_server
from tests.support.billing import fresh_ledger


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The one PostgreSQL of a run; each test makes a database of its own on it."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def empty_postgres_ledger(postgres: str) -> Iterator[str]:
    """The name of a database with the schema and nothing in it, to be copied."""
    with fresh_database(postgres) as url:
        open_store(url).close()
        yield url.rpartition("/")[2]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A ledger that holds nothing yet."""
    if request.param == "sqlite":
        yield fresh_ledger(tmp_path / "ledger.sqlite3")
    else:
        server = request.getfixturevalue("postgres")
        empty = request.getfixturevalue("empty_postgres_ledger")
        with fresh_database(server, empty) as database:
            yield database
