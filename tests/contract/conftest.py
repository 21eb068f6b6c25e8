"""A ledger on each kind of database, for the suites that both must pass."""

import pytest

from billing.proof import audit
from tests.support.billing import running_ledger


@pytest.fixture
def house(url):
    """A running ledger; whatever a test did to it, it proves afterwards."""
    with running_ledger(url) as house:
        yield house
        proof = audit.verify(house.ledger.store)
        assert proof.problems == []
