"""Ended requests, which the dashboard shows after a restart too.

It is a convenience, not a record: the ledger alone says what was charged. Prompts are never
written.
"""

import io
import pickle
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from enum import Enum
from typing import Any, Final

from api.journal.journal import RequestRecord
from cachesvc.server.state_file import StateFile

OURS: Final = ("api.", "billing.", "engine.", "tiers.")


class Remembered:
    """Over the state file. Call `records` and `read` before it starts; after it any thread may
    write."""

    def __init__(self, file: StateFile, *, max_records: int) -> None:
        self._max_records = max_records
        self._file = file

    def records(self) -> Sequence[RequestRecord]:
        """Ended requests, oldest first. Records of other versions may be omitted."""
        found = self._file.rows("SELECT body FROM records ORDER BY number")
        known: _Known = {}
        return [record for (body,) in found if (record := _record(body, known)) is not None]

    def keep_record(self, record: RequestRecord) -> None:
        kept = replace(record, prompts=())

        def write(db: sqlite3.Connection) -> None:
            body = zlib.compress(pickle.dumps(kept))
            added = db.execute("INSERT INTO records (body) VALUES (?)", (body,))
            oldest = (added.lastrowid or 0) - self._max_records
            db.execute("DELETE FROM records WHERE number <= ?", (oldest,))

        self._file.hand_over(write, owner=record.tenant)


_Known = dict[tuple[str, str], type]


class _Reader(pickle.Unpickler):
    """Unpickles only our own frozen types, so nothing can run code. `known` are those that earlier
    records had: there are thousands of records, each of a dozen types."""

    def __init__(self, body: bytes, known: _Known) -> None:
        super().__init__(io.BytesIO(body))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name))
        if found is None:
            found = self._known[module, name] = self._ours(module, name)
        return found

    def _ours(self, module: str, name: str) -> type:
        found = super().find_class(module, name) if module.startswith(OURS) else None
        if isinstance(found, type) and (
            is_dataclass(found) or issubclass(found, Enum | bytes | tuple)
        ):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is none of ours")


def _record(body: bytes, known: _Known) -> RequestRecord | None:
    """None for a record that this version cannot read."""
    try:
        record = _Reader(zlib.decompress(body), known).load()
        assert isinstance(record, RequestRecord) and record.nbytes
        replace(record)  # fails where an older version knew fewer fields
    except Exception:  # noqa: BLE001  another version's values fail in as many ways as there are
        return None
    return record
