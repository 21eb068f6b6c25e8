"""A side file whose thread meets trouble: what it costs, and that a server still ends."""

import sqlite3
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from cachesvc.server import state_file
from cachesvc.server.state_file import QUEUE, QUEUE_BYTES, PendingWrites
from tests.support.state import numbers

LOCKS = (
    "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); "
    "db.execute('PRAGMA locking_mode = EXCLUSIVE'); db.execute('BEGIN EXCLUSIVE'); "
    "print(flush=True); sys.stdin.read()"
)


def insert(number):
    return lambda db: db.execute("INSERT INTO t VALUES (?)", (number,))


@contextmanager
def locked_by_another(path):
    command, pipe = [sys.executable, "-Ic", LOCKS, str(path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        other.stdout.readline()
        yield
        other.communicate()


def ends(file):
    closing = threading.Thread(target=file.close, daemon=True)
    closing.start()
    closing.join(60)
    return not closing.is_alive()


@pytest.mark.parametrize("begun", [True, False])
def test_a_server_ends_while_another_program_has_its_file(tmp_path, monkeypatch, begun):
    """With as many writes waiting as may wait."""
    monkeypatch.setattr(state_file, "BUSY_S", 0.05)
    file = numbers(tmp_path / "side.sqlite3")
    written = threading.Event()
    if begun:
        file.start()
        file.hand_over(lambda db: written.set())
        assert written.wait(60)
    with locked_by_another(tmp_path / "side.sqlite3"):
        if not begun:
            file.start()
        for number in range(QUEUE + 1):
            file.hand_over(insert(number))
        assert ends(file)


def test_a_write_that_fails_in_any_way_ends_no_other(tmp_path, caplog):
    file = numbers(tmp_path / "side.sqlite3")
    file.start()
    failed = threading.Event()

    def fail(db):
        failed.set()
        raise OverflowError("Python int too large to convert to SQLite INTEGER")

    file.hand_over(fail)
    assert failed.wait(60)
    for number in range(100):
        file.hand_over(insert(number))
    file.close()
    assert file.rows("SELECT n FROM t ORDER BY n DESC LIMIT 1") == [(99,)]
    assert "too large" in caplog.text


def test_who_floods_a_slow_disk_loses_its_own_writes_only(tmp_path):
    """By bytes: what waits of the largest owner makes room, its oldest first."""
    file = numbers(tmp_path / "side.sqlite3")
    file.start()
    slow, freed = threading.Event(), threading.Event()
    file.hand_over(lambda db: slow.set() or freed.wait(60))
    assert slow.wait(60)
    file.hand_over(insert(1), 1000, owner="polite")
    for number in range(20):
        file.hand_over(insert(100 + number), QUEUE_BYTES // 10, owner="flood")
    file.hand_over(insert(2), QUEUE_BYTES // 3, owner="polite")
    file.hand_over(insert(3), QUEUE_BYTES + 1, owner="huge")
    freed.set()
    file.close()
    kept = [number for (number,) in file.rows("SELECT n FROM t ORDER BY n")]
    assert [1, 2, *range(114, 120)] == kept


def test_who_makes_most_writes_loses_its_own_only():
    """By number: a deletion has no bytes, and a removal of a tenant's data is not lost."""
    pending, made = PendingWrites(), list[int]()
    pending.add(lambda db: made.append(1), "polite", 0)
    pending.add(lambda db: made.append(2), None, 0)
    for _ in range(QUEUE + 5):
        pending.add(lambda db: made.append(3), "flood", 0)
    pending.end()
    nothing = sqlite3.connect(":memory:")
    while batch := pending.next_batch():
        for write in batch:
            write(nothing)
    nothing.close()
    assert [1, 2] == made[:2]
    assert len(made) == QUEUE


def test_a_large_batch_takes_no_room_from_what_follows():
    """While a tenant's writes are made, as much may wait again."""
    pending = PendingWrites()
    for _ in range(64):
        pending.add(lambda db: None, "flood", QUEUE_BYTES // 64)
    taken = pending.next_batch()
    assert len(taken) < 64
    pending.add(lambda db: None, "polite", QUEUE_BYTES // 64)
    pending.end()
    left = 0
    while batch := pending.next_batch():
        left += len(batch)
    assert left == 64 - len(taken) + 1
