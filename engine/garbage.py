"""Keeps Python's garbage collector from scanning modules and weights, which it can never free."""

import atexit
import gc


def freeze_loaded() -> None:
    """Stop scanning everything loaded so far, until the process ends.

    At exit the objects are made visible again. Otherwise extension modules report their unfreed
    objects as leaks, and triton's would print them all.
    """
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
