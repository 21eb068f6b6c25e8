"""What unit tests leave open is closed."""

from collections.abc import Iterator

import pytest

from tests.support.disks import close_all


@pytest.fixture(autouse=True)
def closes_disks() -> Iterator[None]:
    yield
    close_all()
