"""The writes that a side file has yet to make, bounded by number and by bytes.

When they are too many, the owner with the most loses its oldest, so no tenant can displace the
writes of the others.
"""

import sqlite3
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from itertools import count
from typing import Final

QUEUE: Final = 10_000  # maximum of pending writes
QUEUE_BYTES: Final = 64 << 20  # maximum of their bytes together
GATHER: Final = 500  # maximum of writes in one batch
GATHER_BYTES: Final = 8 << 20  # a batch ends with the write that reaches this

Write = Callable[[sqlite3.Connection], object]


class PendingWrites:
    """In order. Any thread may add; one takes batches. After `end` it waits for no more.

    A batch that has been taken counts no longer, so a slow write of one owner takes no room from
    the others.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = count()
        self._writes: OrderedDict[int, tuple[Write, Hashable, int]] = OrderedDict()
        self._owned: dict[Hashable, OrderedDict[int, None]] = {}  # its writes, oldest first
        self._owned_bytes: Counter[Hashable] = Counter()
        self._num_bytes = 0
        self._ended = False

    def begin(self) -> None:
        self._ended = False

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def add(self, write: Write, owner: Hashable, nbytes: int) -> None:
        """Adds a write with `nbytes` of data, unless it alone is too large."""
        if nbytes > QUEUE_BYTES:
            return
        with self._changed:
            number = next(self._numbers)
            self._writes[number] = write, owner, nbytes
            self._owned.setdefault(owner, OrderedDict())[number] = None
            self._owned_bytes[owner] += nbytes
            self._num_bytes += nbytes
            while self._num_bytes > QUEUE_BYTES:
                self._drop(max(self._owned, key=self._owned_bytes.__getitem__))
            if len(self._writes) > QUEUE:
                self._drop(max(self._owned, key=lambda owner: len(self._owned[owner])))
            self._changed.notify()

    def next_batch(self) -> list[Write]:
        """The oldest writes, at least one; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._writes or self._ended)
            batch: list[Write] = []
            gathered = 0
            while self._writes and len(batch) < GATHER and gathered < GATHER_BYTES:
                write, nbytes = self._remove(next(iter(self._writes)))
                batch.append(write)
                gathered += nbytes
            return batch

    def _drop(self, owner: Hashable) -> None:
        self._remove(next(iter(self._owned[owner])))

    def _remove(self, number: int) -> tuple[Write, int]:
        write, owner, nbytes = self._writes.pop(number)
        self._num_bytes -= nbytes
        self._owned_bytes[owner] -= nbytes
        owned = self._owned[owner]
        del owned[number]
        if not owned:
            del self._owned[owner], self._owned_bytes[owner]
        return write, nbytes
