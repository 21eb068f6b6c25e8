"""The power goes while a ledger writes: what was said to be charged is on the disk.

What a disk holds after a cut: every byte as of the last sync, and of what was written since, any
part in any order. SQLite syncs too, where a checkpoint begins (the log) and ends (the database),
and the header of a log that is begun anew, before its frames: `strace` shows that it does.
"""

import os
import random
import shutil
import sqlite3
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome
from billing.money import UNITS
from billing.usage import Usage
from tests.support.billing import booked, running_ledger
from tests.support.threads import beside, ending

CUTS = 9
SECTOR = 512
PAGE = 4096
HEADER = 32  # of the log
USED = Usage(miss=3, output=2)


class Disk:
    """The ledger's two files as they are, and as they surely outlive a cut."""

    def __init__(self, path, monkeypatch):
        self._database, self._log = path, Path(f"{path}-wal")
        self.lock = threading.Lock()
        self.synced = (b"", b"")
        self.sync_all()
        sync = os.fdatasync

        def fdatasync(handle):
            log = self._log.read_bytes()
            sync(handle)
            with self.lock:
                self.synced = (self.synced[0], log)

        monkeypatch.setattr(os, "fdatasync", fdatasync)

    def sync_log(self):
        with self.lock:
            self.synced = (self.synced[0], self._log.read_bytes())

    def sync_all(self):
        with self.lock:
            self.synced = (self._database.read_bytes(), self._log.read_bytes())

    def cut(self, into, dice):
        """What a machine finds that starts again now. Nobody else writes the log meanwhile."""
        database, log = self.synced
        now = self._log.read_bytes()
        torn = torn_between(log, now, SECTOR, dice)
        torn[:HEADER] = now[:HEADER]
        into.mkdir()
        found = into / "ledger.sqlite3"
        found.write_bytes(torn_between(database, self._database.read_bytes(), PAGE, dice))
        Path(f"{found}-wal").write_bytes(torn)
        return found


def torn_between(old, new, unit, dice):
    """Each unit as it was or as it is."""
    mixed = bytearray(new)
    share = dice.random()
    for start in range(0, len(new), unit):
        if dice.random() < share:
            was = old[start : start + unit]
            mixed[start : start + unit] = was.ljust(len(mixed[start : start + unit]), b"\0")
    return mixed


@contextmanager
def clients(house):
    """Four threads that ask, and what they were told."""
    over, told = threading.Event(), []

    def ask(number):
        turn = 0
        while not over.is_set():
            turn += 1
            name = f"{number}-{turn}"
            hold = house.reserve(name, 10**7, session=str(number))
            house.ledger.top_up(hold, 1, usage=Usage(miss=3, output=1)).result()
            house.ledger.settle(hold, USED, Outcome.FINISHED).result()
            told.append(name)

    with beside(*(partial(ask, number) for number in range(4))), ending(over):
        yield told


def prove(found, told):
    """The database is whole, its books are right, and every answer that was told is paid."""
    with sqlite3.connect(found) as plain:
        assert [("ok",)] == plain.execute("PRAGMA integrity_check").fetchall()
    plain.close()
    entries = booked(f"sqlite:///{found}")
    charged = {entry.request_id: entry for entry in entries if entry.kind is Kind.CHARGE}
    assert set() == set(told) - charged.keys(), "an answer was free"
    assert {entry.amount for entry in charged.values()} <= {-7_000_000}  # none, on a busy machine
    shutil.rmtree(found.parent)


def test_acknowledged_entries_survive_a_power_failure(tmp_path, monkeypatch):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr("billing.store.store.CHECKPOINT_COMMANDS", 10**6)  # where the test says so
    path = tmp_path / "ledger.sqlite3"
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(10**6 * UNITS)
        store = house.ledger.store
        disk = Disk(path, monkeypatch)
        with clients(house) as answered:
            for number in range(CUTS):
                threading.Event().wait(dice.uniform(0.01, 0.08))
                is_copied = number % 3 == 2  # the log, into the database, while the power goes
                copying = threading.Thread(target=copy_log, args=(house, disk))
                with store._lane:
                    if is_copied:
                        disk.sync_log()
                        copying.start()
                    with disk.lock:
                        told = list(answered)
                        found = disk.cut(tmp_path / str(number), dice)
                if is_copied:
                    copying.join()
                prove(found, told)
        assert len(answered) > 20


def copy_log(house, disk):
    house.ledger.store._commands_since_checkpoint = 10**6
    house.ledger.store.checkpoint()
    with house.ledger.store._lane:
        disk.sync_all()
