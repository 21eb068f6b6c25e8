"""Memory for one record: it begins on a page, as reads past the page cache demand."""

import mmap


class Room:
    """Grows to the largest record asked for, and belongs to one thread at a time."""

    def __init__(self) -> None:
        self._view = memoryview(mmap.mmap(-1, mmap.PAGESIZE))

    def take(self, nbytes: int) -> memoryview:
        """At least `nbytes`; the same memory as at the call before."""
        if len(self._view) < nbytes:
            whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            self._view = memoryview(mmap.mmap(-1, whole))
        return self._view
