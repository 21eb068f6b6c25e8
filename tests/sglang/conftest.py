"""SGLang's own classes in `.venv-sglang` (`make test-sglang`), beside our packages."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

CLASSES = Path(__file__).parents[2] / ".venv-sglang"


@pytest.fixture(scope="session")
def sglang():
    """`tests.sglang.pools`, imported with SGLang's classes, which takes seconds."""
    if not (CLASSES / "sglang").exists():
        pytest.fail("there is no .venv-sglang; run make test-sglang")
    sys.path.append(str(CLASSES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of theirs
        return importlib.import_module("tests.sglang.pools")


@pytest.fixture
def model(sglang, tmp_path):
    """A model to the backend: files of which KV depends. This process serves it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    sglang.serves(folder)
    return folder


@pytest.fixture
def opened(sglang, model, tmp_path):
    """Opens our backend over host pools, by SGLang's factory. All are closed at the end."""
    made = []

    def opened(pools, *, folder=tmp_path / "kv", options=None, **told):
        extra = sglang.options(folder, **(options or {}))
        made.append(sglang.opened("dynamic", sglang.config(extra, **told), pools))
        return made[-1]

    yield opened
    for storage in made:
        storage.close()
