"""The versions of transformers with which every model of docs/models.md is served.

`pyproject.toml` allows more. Under another one a model may be refused whose modules, there, do not
call what pages their states and keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import transformers

from engine.errors import ModelError

SERVES_ALL = ("5.23", "5.24")
SPECIFIER = "transformers>=5.23,<5.25"


@contextmanager
def naming_versions() -> Iterator[None]:
    """Lets a ModelError of the block say it if transformers is another version."""
    try:
        yield
    except ModelError as error:
        installed = transformers.__version__
        if ".".join(installed.split(".")[:2]) in SERVES_ALL:
            raise
        raise ModelError(
            f"{error}; transformers {installed} is installed, and models are tried with "
            f"{' and '.join(SERVES_ALL)}: pip install '{SPECIFIER}'"
        ) from error
