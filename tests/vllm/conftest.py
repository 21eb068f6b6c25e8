"""A real vLLM in an environment of its own (`make test-vllm`), the default model, real nodes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.models.files import DEFAULT_MODEL, find
from tests.vllm.processes import PYTHON, Engine, RunningNode


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.fail("there is no .venv-vllm; run make test-vllm")
    return find(DEFAULT_MODEL, tmp_path_factory.mktemp("models"), lambda what, part: None)[0]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    running = RunningNode(tmp_path)
    running.start()
    try:
        yield running
    finally:
        running.kill()


@contextmanager
def started(
    model: Path, node: RunningNode | None, folder: Path, **options: Any
) -> Iterator[Engine]:
    log = folder / f"vllm-{time.time_ns()}.log"
    engine = Engine(model, node.socket if node else None, log, core_apart=False, **options)
    try:
        yield engine
    finally:
        engine.kill()
