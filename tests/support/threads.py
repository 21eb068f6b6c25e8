"""What is done beside a test, on threads that have ended when it goes on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(*works: Callable[[], object]) -> Iterator[None]:
    """Each of the works on a thread of its own. Leaving the block waits for all of them."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


@contextmanager
def ending(over: threading.Event) -> Iterator[None]:
    """Sets the event that ends them, when the block is left."""
    try:
        yield
    finally:
        over.set()
