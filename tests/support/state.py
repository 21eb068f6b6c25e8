"""Each part of the state file alone over a file of its own, as one test needs it."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from cachesvc.server.kept_turns import KeptTurns
from cachesvc.server.request_memory import Remembered
from cachesvc.server.state_file import StateFile


class FiledTurns(KeptTurns):
    def __init__(self, path: Path, **bounds: Any) -> None:
        self.state = StateFile(path)
        super().__init__(self.state, **bounds)

    def start(self) -> None:
        self.state.start()
        super().start()

    def close(self) -> None:
        self.state.close()


class FiledRemembered(Remembered):
    def __init__(self, path: Path, *, max_records: int) -> None:
        self.state = StateFile(path)
        super().__init__(self.state, max_records=max_records)

    def start(self) -> None:
        self.state.start()

    def close(self) -> None:
        self.state.close()


def numbers(path: Path) -> StateFile:
    """A state file with a table `t` of numbers `n`."""
    file = StateFile(path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE IF NOT EXISTS t (n)")
    return file
