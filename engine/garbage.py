"""Keeps Python's garbage collector from scanning modules and weights, which it can never free, and
requests, which nearly always free themselves."""

import atexit
import gc
from typing import Final

# Objects made and not yet freed, before the young are scanned. A request has some 1,000 until it
# ends. Python's own 700 scanned each several times: 7 % of the event loop's time (measured).
YOUNG: Final = 10_000
_USUAL: Final = gc.get_threshold()


def freeze_loaded() -> None:
    """Stop scanning everything loaded so far, until `thaw` or the end of the process.

    At exit the objects are made visible again. Otherwise extension modules report their unfreed
    objects as leaks, and triton's would print them all.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *_USUAL[1:])
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


def thaw() -> None:
    """Scan everything again, as often as usual, so that what a closed engine leaves is freed.

    A frozen cycle is never freed. An engine that still runs beside it is only scanned again.
    """
    atexit.unregister(gc.unfreeze)
    gc.unfreeze()
    gc.set_threshold(*_USUAL)
