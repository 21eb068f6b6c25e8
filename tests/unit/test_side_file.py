"""A side file whose thread meets trouble: what it costs, and that a server still ends."""

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachesvc.server import side_file
from cachesvc.server.side_file import QUEUE, SideFile

LOCKS = (
    "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); "
    "db.execute('PRAGMA locking_mode = EXCLUSIVE'); db.execute('BEGIN EXCLUSIVE'); "
    "print(flush=True); sys.stdin.read()"
)


def opened(path: Path) -> SideFile:
    return SideFile(path, schema=1, tables="CREATE TABLE IF NOT EXISTS t (n)", what="numbers")


def insert(number: int) -> side_file.Write:
    return lambda db: db.execute("INSERT INTO t VALUES (?)", (number,))


@contextmanager
def locked_by_another(path: Path) -> Iterator[None]:
    command, pipe = [sys.executable, "-Ic", LOCKS, str(path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield
        other.communicate()


def ends(file: SideFile) -> bool:
    closing = threading.Thread(target=file.close, daemon=True)
    closing.start()
    closing.join(60)
    return not closing.is_alive()


@pytest.mark.parametrize("begun", [True, False])
def test_a_server_ends_while_another_program_has_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """With as many writes waiting as may wait."""
    monkeypatch.setattr(side_file, "BUSY_S", 0.05)
    file = opened(tmp_path / "side.sqlite3")
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


def test_a_write_that_fails_in_any_way_ends_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = opened(tmp_path / "side.sqlite3")
    file.start()
    failed = threading.Event()

    def fail(db: sqlite3.Connection) -> None:
        failed.set()
        raise OverflowError("Python int too large to convert to SQLite INTEGER")

    file.hand_over(fail)
    assert failed.wait(60)
    for number in range(100):
        file.hand_over(insert(number))
    file.close()
    assert file.rows("SELECT n FROM t ORDER BY n DESC LIMIT 1") == [(99,)]
    assert "too large" in caplog.text
