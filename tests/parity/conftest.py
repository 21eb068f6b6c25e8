"""Real engines in a test's folder, closed with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.models.load import LoadedModel
from tests.support.house import House


@pytest.fixture
def open_house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    houses: list[House] = []

    def build(loaded: LoadedModel, **settings: Any) -> House:
        houses.append(House(loaded, tmp_path, **settings))
        return houses[-1]

    yield build
    for each in houses:
        if each.engine._thread.is_alive():
            each.close()
