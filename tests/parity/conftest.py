"""Real engines in a test's folder, closed with it."""

import pytest

from tests.support.house import House


@pytest.fixture
def open_house(tmp_path):
    houses = []

    def build(loaded, **settings):
        houses.append(House(loaded, tmp_path, **settings))
        return houses[-1]

    yield build
    for each in houses:
        if each.engine._thread.is_alive():
            each.close()
