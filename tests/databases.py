"""Fixtures: a ledger's database of each kind, for the suites that both must pass."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres_server import fresh_database, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The one PostgreSQL of a run; each test makes a database of its own on it."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database that holds nothing yet."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    else:
        with fresh_database(request.getfixturevalue("postgres")) as database:
            yield database
