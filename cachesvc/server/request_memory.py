"""What the server remembers of requests: the journal, turns and stored responses.

What survives a restart is in the state file. It is a convenience, not a record: the ledger alone
says what was charged. Prompts are never written. Event loop only, but for `start` and `close`.
"""

import asyncio
import io
import pickle
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from enum import Enum
from typing import Any, Final

from api.access.auth import Salts
from api.collaborators import Records
from api.journal.journal import Journal, JournalSettings, RequestRecord
from api.requests.kept import owner_of
from api.requests.responses import StoredResponses
from api.requests.turns import Conversations
from cachesvc.config.settings import Settings
from cachesvc.operator.scopes import ScopeKind, salt_of
from cachesvc.server.kept_turns import KeptTurns, forget_stored
from cachesvc.server.state_file import FILE_NAME, StateFile

OURS: Final = ("api.", "billing.", "engine.", "tiers.")


class Remembered:
    """Ended requests, which the dashboard shows after a restart too, over the state file. Call
    `records` before it starts; after it any thread may write."""

    def __init__(self, file: StateFile, *, max_records: int) -> None:
        self._max_records = max_records
        self._file = file

    def records(self) -> Sequence[RequestRecord]:
        """Ended requests, oldest first. Records of other versions may be omitted."""
        found = self._file.rows("SELECT body FROM records ORDER BY number")
        known: _Known = {}
        return [record for (body,) in found if (record := _record(body, known)) is not None]

    def keep_record(self, record: RequestRecord) -> None:
        kept = replace(record, prompts=()) if record.prompts else record

        def write(db: sqlite3.Connection) -> None:
            body = zlib.compress(pickle.dumps(kept), 1)
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


class RequestMemory:
    """`records` are the wire's. `remembered` is the dashboard's part of the file."""

    def __init__(self, settings: Settings, salts: Salts) -> None:
        self._data_dir = settings.server.data_dir
        self._salts = salts
        self._file = StateFile(self._data_dir / FILE_NAME)
        self._turns = KeptTurns(self._file)
        kept = settings.journal
        self.remembered = Remembered(self._file, max_records=kept.requests)
        journal = JournalSettings(max_requests=kept.requests, keep_prompts=kept.keep_prompts)
        self.records = Records(
            journal=Journal(journal, on_end=self.remembered.keep_record),
            conversations=Conversations(kept=self._turns),
            responses=StoredResponses(kept=self._turns),
        )
        self.records.journal.restore(self.remembered.records())

    def start(self) -> None:
        """Begins to write. Call after all has been read from the file."""
        self._file.start()
        self._turns.start()

    def close(self) -> None:
        self._file.close()

    async def forget(self, kind: ScopeKind, name: str) -> None:
        """Removes a purged owner's conversations together with its blocks. Raises PurgeFailed."""
        owner, records = owner_of(salt_of(self._salts, name, kind)), self.records
        records.purges.note(owner)
        for each in (records.responses, records.conversations):
            each.forget(owner)
        await asyncio.to_thread(forget_stored, self._data_dir, owner)
