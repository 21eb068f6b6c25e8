"""Python's collector and what is loaded once: modules and weights, which no collection can free."""

import atexit
import gc


def freeze_loaded() -> None:
    """Look no more at what is loaded now, until the process ends.

    Then it is looked at again: extension modules find out which of their objects nobody freed, and
    triton's would print them all.
    """
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
