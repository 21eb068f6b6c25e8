"""What the dashboard knows, kept over restarts: ended requests, the history's samples, logins.

One SQLite file in the data directory, written by a thread of its own in small transactions. It is a
convenience and no record: a file that cannot be read begins anew, a write that fails is logged once
and costs what it held. The ledger alone says what was charged. Prompts are never written.
"""

import io
import logging
import pickle
import queue
import sqlite3
import threading
import zlib
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from api.journal.journal import Record

logger = logging.getLogger(__name__)

FILE_NAME: Final = "dashboard.sqlite3"
SCHEMA: Final = 1  # of the file; one of another is begun anew
QUEUE: Final = 10_000  # writes that may wait; further ones are dropped
GATHER: Final = 500  # writes of one transaction, at most
OURS: Final = ("api.", "billing.", "engine.", "tiers.")

_Write = tuple[str, Any]


class Remembered:
    """The file. `load` and `read` before `start`; after it any thread hands over, and one writes.

    With no `path` it remembers nothing.
    """

    def __init__(self, path: Path | None, *, max_records: int) -> None:
        self._path = path
        self._max_records = max_records
        self._queue: queue.Queue[_Write | None] = queue.Queue(QUEUE)
        self._thread: threading.Thread | None = None
        self._failed = False
        self.num_dropped = 0
        if path is not None:
            self._begin(path)

    def records(self) -> Sequence[Record]:
        """Ended requests, the oldest first. What another version wrote may be left out."""
        found = self._rows("SELECT body FROM records ORDER BY number")
        return [record for (body,) in found if (record := _record(body)) is not None]

    def read(self, name: str) -> bytes | None:
        """What was kept under a name."""
        found = self._rows("SELECT body FROM states WHERE name = ?", name)
        return zlib.decompress(found[0][0]) if found else None

    def start(self) -> None:
        if self._path is not None and not self._failed:
            self._thread = threading.Thread(target=self._write_all, name="remembered", daemon=True)
            self._thread.start()

    def keep_record(self, record: Record) -> None:
        self._hand_over(("record", record))

    def keep(self, name: str, body: bytes) -> None:
        self._hand_over((name, body))

    def close(self) -> None:
        """Write what waits, and stop."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _hand_over(self, write: _Write) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(write)
        except queue.Full:
            self.num_dropped += 1

    def _begin(self, path: Path) -> None:
        """Make the file fit, anew where it is damaged or another version's."""
        for attempt in range(2):
            try:
                with self._connect(path) as connection:
                    version = connection.execute("PRAGMA user_version").fetchone()[0]
                    if version not in (0, SCHEMA):
                        raise sqlite3.DatabaseError(f"its schema is {version}")
                    connection.executescript(
                        "CREATE TABLE IF NOT EXISTS records"
                        " (number INTEGER PRIMARY KEY, body BLOB NOT NULL);"
                        "CREATE TABLE IF NOT EXISTS states (name TEXT PRIMARY KEY, body BLOB);"
                        f"PRAGMA user_version = {SCHEMA}"
                    )
                connection.close()
                return
            except (sqlite3.Error, OSError) as error:
                if attempt:
                    self._give_up(error)
                    return
                logger.warning(f"{path} is begun anew, as it cannot be read: {error}")
                for each in path.parent.glob(f"{path.name}*"):
                    each.unlink(missing_ok=True)

    def _connect(self, path: Path) -> sqlite3.Connection:
        path.touch(mode=0o600)
        connection = sqlite3.connect(path, timeout=5.0)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def _rows(self, statement: str, *values: str) -> list[Any]:
        if self._path is None or self._failed:
            return []
        try:
            connection = self._connect(self._path)
            try:
                return connection.execute(statement, values).fetchall()
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            logger.warning(f"the dashboard begins empty: {error}")
            return []

    def _write_all(self) -> None:
        assert self._path is not None
        try:
            connection = self._connect(self._path)
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)
            return
        try:
            while (batch := self._next_batch()) is not None:
                try:
                    with connection:
                        self._write(connection, batch)
                except (sqlite3.Error, OSError) as error:
                    self._give_up(error)
        finally:
            connection.close()

    def _next_batch(self) -> list[_Write] | None:
        """What waits, at least one; None at the end."""
        first = self._queue.get()
        if first is None:
            return None
        batch = [first]
        while len(batch) < GATHER:
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                break
            if following is None:
                self._queue.put(None)  # for the next turn
                break
            batch.append(following)
        return batch

    def _write(self, connection: sqlite3.Connection, batch: Sequence[_Write]) -> None:
        records = [value for name, value in batch if name == "record"]
        connection.executemany(
            "INSERT INTO records (body) VALUES (?)",
            [(zlib.compress(pickle.dumps(replace(each, prompts=()))),) for each in records],
        )
        if records:
            connection.execute(
                "DELETE FROM records WHERE number <= (SELECT max(number) FROM records) - ?",
                (self._max_records,),
            )
        states = {name: value for name, value in batch if name != "record"}
        connection.executemany(
            "INSERT OR REPLACE INTO states VALUES (?, ?)",
            [(name, zlib.compress(body, 1)) for name, body in states.items()],
        )

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            logger.error(f"the dashboard will not remember over a restart: {error}")
        self._failed = True


class _Reader(pickle.Unpickler):
    """Reads values of our own frozen types and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.startswith(OURS) else None
        if isinstance(found, type) and (
            is_dataclass(found) or issubclass(found, Enum | bytes | tuple)
        ):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is none of ours")


def _record(body: bytes) -> Record | None:
    """None for what this version cannot read."""
    try:
        record = _Reader(io.BytesIO(zlib.decompress(body))).load()
        assert isinstance(record, Record) and record.nbytes
    except Exception:  # noqa: BLE001  another version's values fail in as many ways as there are
        return None
    return record
