"""Keeps Python's garbage collector from scanning modules and weights, which it can never free."""

import atexit
import gc


def freeze_loaded() -> None:
    """Stop scanning everything loaded so far, until `thaw` or the end of the process.

    At exit the objects are made visible again. Otherwise extension modules report their unfreed
    objects as leaks, and triton's would print them all.
    """
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


def thaw() -> None:
    """Scan everything again, so that what a closed engine leaves behind is freed.

    A frozen cycle is never freed. An engine that still runs beside it is only scanned again.
    """
    atexit.unregister(gc.unfreeze)
    gc.unfreeze()
