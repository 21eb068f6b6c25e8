"""Lifetimes and events of blocks on disk.

Every committed write transaction of this process and every load is reported here. Any thread.
"""

import threading
from collections.abc import Callable, Sequence

from tiers.disk.format.record import is_window, parent_of, tokens_of, written_s_of
from tiers.disk.format.rows import IndexEntry
from tiers.disk.transaction import Gone, Writer
from tiers.telemetry.events import EventKind, EventStream
from tiers.telemetry.lifetimes import Lives
from tiers.tier import LifeStats, TierName


class DiskEvents:
    """One disk tier's lifetimes, and its events in the stream. Times are whole seconds."""

    def __init__(self, stream: EventStream, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._stream = stream
        self._lock = threading.Lock()
        self._lives = Lives()

    def opened(self, num_blocks: int) -> None:
        """Records an opened shard with this many blocks, also an empty replacement."""
        if num_blocks == 0 and self._stream.listening:
            self._stream.publish(EventKind.CLEARED, TierName.DISK)

    def committed(self, writer: Writer) -> None:
        gone = [each for each in writer.gone if not is_window(each.key)]
        if gone:
            with self._lock:
                for _, entry, cause in gone:
                    lived_s = writer.now_s - written_s_of(entry.header)
                    idle_s = writer.now_s - entry.place.used_s
                    self._lives.left(cause, lived_s=max(0, lived_s), idle_s=max(0, idle_s))
        if self._stream.listening:
            self._tell(gone, writer)

    def served(self, entries: Sequence[IndexEntry]) -> None:
        """Records blocks read for a request. Their last use is that of the last write."""
        now_s = self.clock()
        with self._lock:
            for entry in entries:
                self._lives.reused(max(0.0, now_s - entry.place.used_s))

    def lives(self) -> LifeStats:
        with self._lock:
            return self._lives.stats()

    def _tell(self, gone: Sequence[Gone], writer: Writer) -> None:
        for key, entry, cause in gone:
            self._stream.publish(
                EventKind.REMOVED,
                TierName.DISK,
                key=key,
                parent=parent_of(entry.header),
                scope=entry.scope,
                nbytes=entry.place.nbytes,
                cause=cause,
            )
        for key, entry in writer.fresh:
            if is_window(key):
                continue
            self._stream.publish(
                EventKind.MOVED,
                TierName.DISK,
                key=key,
                parent=parent_of(entry.header),
                scope=entry.scope,
                tokens=tokens_of(entry.header),
                nbytes=entry.place.nbytes,
                source=TierName.HOST,
            )
