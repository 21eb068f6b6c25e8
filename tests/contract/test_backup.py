"""A backup as docs/deploy.md describes it, made while the ledger is written."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from billing.money import UNITS
from billing.proof import audit
from billing.store.opening import database_url
from billing.usage import Usage
from tests.support.billing import booked, entries_of, running_ledger
from tests.support.threads import beside, ending

BACKUPS = 4


def backup(source: Path, target: Path) -> None:
    """What `.backup` of the sqlite3 program does."""
    with (
        closing(sqlite3.connect(source / "ledger.sqlite3")) as live,
        closing(sqlite3.connect(target)) as copy,
    ):
        live.backup(copy)


def test_a_copy_of_a_ledger_in_use_is_an_earlier_state_of_it(tmp_path):
    with running_ledger(database_url(tmp_path)) as house:
        house.fund(100 * UNITS)
        stopping, begun = threading.Event(), threading.Event()

        def serve() -> None:
            number = 0
            while not stopping.is_set():
                house.charge(f"r{number}", Usage(miss=1000, output=10))
                number += 1
                begun.set()

        copies = [tmp_path / f"copy{number}.sqlite3" for number in range(BACKUPS)]
        with beside(serve), ending(stopping):
            begun.wait()
            for copy in copies:
                backup(tmp_path, copy)
        written = entries_of(house.ledger.store)
    for copy in copies:
        kept = booked(f"sqlite:///{copy}")
        assert 1 < len(kept)
        assert written[: len(kept)] == kept
        with running_ledger(f"sqlite:///{copy}") as restored:  # it settles what was running
            assert audit.verify(restored.ledger.store).ok
