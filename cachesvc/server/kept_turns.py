"""Turns of chats and stored responses on disk, so that conversations continue after a restart.

They are in the state file. Entries have names made with their tenant's salt. They are
bounded by number, bytes and age, and a purge removes their owner's. If there are too many, the
owner with the most loses its least recently used entries first, so that no tenant can displace the
others. Names are in memory. A body is read on demand, off the event loop.
"""

import asyncio
import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

from api.requests.kept import KeptBodies
from cachesvc.server.state_file import BUSY_S, FILE_NAME, StateFile
from tiers.errors import PurgeFailed

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 256 << 20
MAX_AGE_S: Final = 30 * 86_400
MAX_ENTRIES: Final = 1 << 17  # names in memory, 130 bytes each: 17 MB when full
PRUNE_EVERY: Final = 64  # writes


def forget_stored(data_dir: Path, owner: bytes) -> None:
    """Removes all entries of one owner from the file for good. Raises PurgeFailed.

    A running server must have forgotten their names before; see `KeptTurns.write`.
    """
    path = data_dir / FILE_NAME
    try:
        if path.exists():
            with closing(sqlite3.connect(path, timeout=BUSY_S)) as file, file:
                file.execute("DELETE FROM kept WHERE owner = ?", (owner,))
    except (sqlite3.Error, OSError) as error:
        raise PurgeFailed(
            f"{path} still holds turns and responses, and cannot be changed: {error}; mend that, "
            "or delete the file while no server runs, and purge again"
        ) from error


class KeptTurns(KeptBodies):
    """Over the state file; see `api.requests.kept`. Event loop only.

    Invariant: at most `max_entries` names, each owner's in order of use, whatever happens to the
    file.
    """

    def __init__(
        self,
        file: StateFile,
        *,
        max_bytes: int = MAX_BYTES,
        max_age_s: int = MAX_AGE_S,
        max_entries: int = MAX_ENTRIES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes, self._max_age_s, self._max_entries = max_bytes, max_age_s, max_entries
        self._clock = clock
        self._num_writes = 0
        self._file = file
        found = self._file.rows(
            "SELECT name, owner FROM kept WHERE used_s > ? ORDER BY used_s DESC LIMIT ?",
            self._oldest_s(),
            max_entries,
        )
        self._lock = threading.Lock()  # the writer thread removes pruned names
        self._same: dict[bytes, bytes] = {}  # interned owners: one object for all names
        self._owners: dict[bytes, bytes] = {}  # by name
        self._names: dict[bytes, dict[bytes, None]] = {}  # by owner, in order of use
        for name, owner in reversed(found):
            self._add(bytes(name), bytes(owner))

    def start(self) -> None:
        """Removes what is too old. Call after the file has started."""
        self._file.hand_over(self._prune)

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    async def read(self, name: bytes) -> bytes | None:
        """The body stored under a name; None if it can no longer be read, or was deleted while it
        was."""
        if name not in self._owners:
            return None
        found = await asyncio.to_thread(
            self._file.rows, "SELECT body FROM kept WHERE name = ?", name
        )
        if not found or name not in self._owners:
            return None
        self._use(name)
        used_s = int(self._clock())
        self._file.hand_over(
            lambda db: db.execute("UPDATE kept SET used_s = ? WHERE name = ?", (used_s, name)),
            owner=self._owners.get(name),
        )
        try:
            return zlib.decompress(found[0][0])
        except zlib.error:
            self.delete(name)
            return None

    def write(self, name: bytes, owner: bytes, body: bytes) -> None:
        with self._lock:
            self._add(name, owner)
            largest = max(self._names.values(), key=lambda names: len(names))
            oldest = next(iter(largest)) if len(self._owners) > self._max_entries else None
        if oldest is not None:
            self.delete(oldest)
        used_s = int(self._clock())

        def write(db: sqlite3.Connection) -> None:
            packed = zlib.compress(body, 1)
            row = (name, owner, used_s, len(packed), packed)
            db.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?)", row)
            if name not in self._owners:  # a purge before this look would otherwise be undone,
                db.execute("DELETE FROM kept WHERE name = ?", (name,))  # a later one waits for us

        self._file.hand_over(write, len(body), owner=owner)
        self._num_writes += 1
        if self._num_writes % PRUNE_EVERY == 0:
            self._file.hand_over(self._prune)

    def delete(self, name: bytes) -> None:
        with self._lock:
            owner = self._remove(name)
        if owner is not None:
            self._file.hand_over(
                lambda db: db.execute("DELETE FROM kept WHERE name = ?", (name,)), owner=owner
            )

    def forget(self, owner: bytes) -> None:
        """Finds no entry of one owner any more. `forget_stored` then removes them from the file."""
        with self._lock:
            for name in self._names.pop(owner, ()):
                del self._owners[name]

    def _prune(self, db: sqlite3.Connection) -> None:
        """Removes entries beyond the bounds of age and size. Writer thread."""
        oldest_s = (self._oldest_s(),)
        old = db.execute("SELECT name FROM kept WHERE used_s <= ?", oldest_s).fetchall()
        db.execute("DELETE FROM kept WHERE used_s <= ?", oldest_s)
        self._leave([name for (name,) in old])
        shares = {
            owner: (number, nbytes)
            for owner, number, nbytes in db.execute(
                "SELECT owner, count(*), sum(size) FROM kept GROUP BY owner"
            )
        }
        more = sum(number for number, _ in shares.values()) - self._max_entries
        over = sum(nbytes for _, nbytes in shares.values()) - self._max_bytes
        while more > 0 or over > 0:
            measure = 1 if over > 0 else 0
            owner = max(shares, key=lambda owner: shares[owner][measure])
            name, size = db.execute(
                "SELECT name, size FROM kept WHERE owner = ? ORDER BY used_s LIMIT 1", (owner,)
            ).fetchone()
            db.execute("DELETE FROM kept WHERE name = ?", (name,))
            self._leave([name])
            shares[owner] = shares[owner][0] - 1, shares[owner][1] - size
            more, over = more - 1, over - size

    def _leave(self, names: Iterable[bytes]) -> None:
        with self._lock:
            for name in names:
                self._remove(name)

    def _add(self, name: bytes, owner: bytes) -> None:
        """Adds a name as the last used. The caller holds the lock, as for `_remove`."""
        self._remove(name)
        owner = self._same.setdefault(owner, owner)
        self._names.setdefault(owner, {})[name] = None
        self._owners[name] = owner

    def _remove(self, name: bytes) -> bytes | None:
        """Removes a name and returns its owner."""
        owner = self._owners.pop(name, None)
        if owner is not None:
            names = self._names[owner]
            del names[name]
            if not names:
                del self._names[owner]
        return owner

    def _use(self, name: bytes) -> None:
        with self._lock:
            owner = self._remove(name)
            if owner is not None:
                self._add(name, owner)

    def _oldest_s(self) -> int:
        return int(self._clock()) - self._max_age_s
