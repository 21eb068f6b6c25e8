"""What unit tests leave open is closed."""

import pytest

from billing.money import UNITS
from billing.proof import audit
from tests.support.billing import running_ledger
from tests.support.disks import close_all


@pytest.fixture(autouse=True)
def closes_disks():
    yield
    close_all()


@pytest.fixture
def path(tmp_path):
    """Where a node listens."""
    return tmp_path / "node.sock"


@pytest.fixture
def house(tmp_path):
    """A ledger in which `acme` has one CNY; proved afterwards."""
    with running_ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}") as house:
        house.fund(UNITS)
        yield house
        assert audit.verify(house.ledger.store).problems == []
