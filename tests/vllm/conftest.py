"""A real vLLM in an environment of its own (`make test-vllm`), the default model, real nodes."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager

import pytest

from engine.models.files import DEFAULT_MODEL, find
from engine.operators.library import BUILT, Operators
from tests.vllm.processes import PYTHON, Engine, Forks

Started = Callable[..., AbstractContextManager[Engine]]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    if not PYTHON.exists():
        pytest.fail("there is no .venv-vllm; run make test-vllm")
    return find(DEFAULT_MODEL, tmp_path_factory.mktemp("models"), lambda what, part: None)


@pytest.fixture(scope="session")
def started(tmp_path_factory):
    """Starts an engine that ends with the block, over a node or alone."""
    if not PYTHON.exists():
        pytest.fail("there is no .venv-vllm; run make test-vllm")
    forks = Forks()
    # The first node would compile beside two engines, and be late with an answer.
    Operators(tmp_path_factory.mktemp("operators"), BUILT).load(patience_s=None)

    @contextmanager
    def start(model, node, folder, **options):
        log = folder / f"vllm-{time.time_ns()}.log"
        engine = Engine(model, node.socket if node else None, log, forks=forks, **options)
        try:
            yield engine
        finally:
            engine.kill()

    yield start
    forks.close()
