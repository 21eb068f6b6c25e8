"""Imports without the garbage collector, for the command line and `serve`.

What a module makes while it is imported lives as long as the process. A collection that runs
meanwhile finds nothing, and takes a sixth of the time that SQLAlchemy needs, a quarter of torch's.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing inside. Where it was on before, the collector is on again afterwards."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
