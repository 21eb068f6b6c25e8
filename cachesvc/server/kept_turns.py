"""Turns of chats and stored responses on disk, so that conversations continue after a restart.

One SQLite file beside the journal's. Entries have names made with their tenant's salt. They are
bounded by number, bytes and age, the least recently used leave first, and a purge removes their
owner's. Names are in memory. A body is read on demand, off the event loop.
"""

import asyncio
import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cachesvc.server.side_file import SideFile

logger = logging.getLogger(__name__)

FILE_NAME: Final = "turns.sqlite3"
SCHEMA: Final = 1
TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS kept (name BLOB PRIMARY KEY, owner BLOB NOT NULL,"
    " used_s INTEGER NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL) WITHOUT ROWID;"
    "CREATE INDEX IF NOT EXISTS kept_used ON kept (used_s);"
    "CREATE INDEX IF NOT EXISTS kept_owner ON kept (owner)"
)
MAX_BYTES: Final = 256 << 20
MAX_AGE_S: Final = 30 * 86_400
MAX_ENTRIES: Final = 1 << 17  # names in memory, 130 bytes each: 17 MB when full
PRUNE_EVERY: Final = 64  # writes


class KeptTurns:
    """The file; see `api.requests.kept`. Without a `path` it stores nothing. Event loop only.

    Invariant: at most `max_entries` names, in order of use, whatever happens to the file.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        max_bytes: int = MAX_BYTES,
        max_age_s: int = MAX_AGE_S,
        max_entries: int = MAX_ENTRIES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._max_entries = max_entries
        self._clock = clock
        self._num_writes = 0
        self._file = SideFile(path, schema=SCHEMA, tables=TABLES, what="turns and responses")
        found = self._file.rows(
            "SELECT name, owner FROM kept WHERE used_s > ? ORDER BY used_s DESC LIMIT ?",
            self._oldest_s(),
            max_entries,
        )
        self._lock = threading.Lock()  # the writer thread removes pruned names
        self._same: dict[bytes, bytes] = {}  # interned owners: one object for all names
        self._owners = {bytes(name): self._one(bytes(owner)) for name, owner in reversed(found)}

    def start(self) -> None:
        self._file.start()
        self._file.hand_over(self._prune)

    def close(self) -> None:
        self._file.close()

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    async def read(self, name: bytes) -> bytes | None:
        """The body stored under a name; None if it can no longer be read."""
        if name not in self._owners:
            return None
        found = await asyncio.to_thread(
            self._file.rows, "SELECT body FROM kept WHERE name = ?", name
        )
        if not found:
            return None
        self._use(name)
        used_s = int(self._clock())
        self._file.hand_over(
            lambda db: db.execute("UPDATE kept SET used_s = ? WHERE name = ?", (used_s, name))
        )
        try:
            return zlib.decompress(found[0][0])
        except zlib.error:
            self.delete(name)
            return None

    def write(self, name: bytes, owner: bytes, body: bytes) -> None:
        with self._lock:
            self._owners.pop(name, None)
            self._owners[name] = self._one(owner)
            full = len(self._owners) > self._max_entries
            oldest = next(iter(self._owners)) if full else None
        if oldest is not None:
            self.delete(oldest)
        used_s = int(self._clock())

        def write(db: sqlite3.Connection) -> None:
            packed = zlib.compress(body, 1)
            row = (name, owner, used_s, len(packed), packed)
            db.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?)", row)

        self._file.hand_over(write, len(body))
        self._num_writes += 1
        if self._num_writes % PRUNE_EVERY == 0:
            self._file.hand_over(self._prune)

    def delete(self, name: bytes) -> None:
        with self._lock:
            known = self._owners.pop(name, None) is not None
        if known:
            self._file.hand_over(lambda db: db.execute("DELETE FROM kept WHERE name = ?", (name,)))

    def forget(self, owner: bytes) -> None:
        """Removes all entries of one owner."""
        with self._lock:
            for name in [name for name, other in self._owners.items() if other == owner]:
                del self._owners[name]
        self._file.hand_over(lambda db: db.execute("DELETE FROM kept WHERE owner = ?", (owner,)))

    def _prune(self, db: sqlite3.Connection) -> None:
        """Removes entries beyond the bounds of age and size. Writer thread."""
        oldest_s, gone = self._oldest_s(), []
        number, nbytes = db.execute("SELECT count(*), coalesce(sum(size), 0) FROM kept").fetchone()
        more, over = number - self._max_entries, nbytes - self._max_bytes
        for name, size, used_s in db.execute("SELECT name, size, used_s FROM kept ORDER BY used_s"):
            if over <= 0 and more <= 0 and used_s > oldest_s:
                break
            gone.append((name,))
            over, more = over - size, more - 1
        db.executemany("DELETE FROM kept WHERE name = ?", gone)
        with self._lock:
            for (name,) in gone:
                self._owners.pop(name, None)

    def _one(self, owner: bytes) -> bytes:
        return self._same.setdefault(owner, owner)

    def _use(self, name: bytes) -> None:
        with self._lock:
            owner = self._owners.pop(name, None)
            if owner is not None:
                self._owners[name] = owner

    def _oldest_s(self) -> int:
        return int(self._clock()) - self._max_age_s
