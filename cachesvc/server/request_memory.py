"""What the server remembers of requests: the journal, turns and stored responses.

What survives a restart is in the state file. Event loop only, but for `start` and `close`.
"""

import asyncio

from api.access.auth import Salts
from api.collaborators import Records
from api.journal.journal import Journal, JournalSettings
from api.requests.kept import owner_of
from api.requests.responses import StoredResponses
from api.requests.turns import Conversations
from cachesvc.config.settings import Settings
from cachesvc.operator.scopes import ScopeKind, salt_of
from cachesvc.server.kept_turns import KeptTurns, forget_stored
from cachesvc.server.remembered import Remembered
from cachesvc.server.state_file import FILE_NAME, StateFile


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
