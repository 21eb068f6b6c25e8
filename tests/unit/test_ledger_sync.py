"""When the ledger waits for the disk: what moved money is told once durable, holds at once."""

import asyncio
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import billing.store.store
from api.requests.metering import durable
from billing.errors import LedgerUnavailable
from billing.gate.commands import Deposit
from billing.gate.entries import Entry, Kind
from billing.gate.outcomes import Outcome
from billing.money import UNITS
from billing.proof import audit
from billing.store.opening import open_store
from billing.store.wal import RESERVE_BYTES, WAL_BYTES
from billing.usage import Usage
from tests.support.billing import running_ledger
from tests.support.faulty_storage import disk_full

USED = Usage(miss=3, output=1)


class Disk:
    """Stands for `fdatasync`: lets nothing through until told, then works or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sync = os.fdatasync
        self.entered, self.go = threading.Event(), threading.Event()
        self.num_syncs = 0
        self.error: OSError | None = None
        monkeypatch.setattr(os, "fdatasync", self)

    def __call__(self, handle: int) -> None:
        self.num_syncs += 1
        self.entered.set()
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        self._sync(handle)


def test_a_settlement_waits_for_the_disk_and_a_hold_does_not(house, monkeypatch):
    first, second = house.reserve("r1", 10**8), house.reserve("r2", 10**8)
    disk = Disk(monkeypatch)
    settling = house.ledger.settle(first, USED, Outcome.FINISHED)
    assert disk.entered.wait(10)
    third = house.reserve("r3", 10**8)  # answered while the disk is waited for
    also = house.ledger.settle(second, USED, Outcome.FINISHED)
    last = house.ledger.settle(third, USED, Outcome.FINISHED)
    house.reserve("r4", 1)
    assert not any(future.done() for future in (settling, also, last))
    disk.go.set()
    assert [1, 2, 3, 4] == sorted(
        [1] + [future.result(10).entry.seq for future in (settling, also, last)]
    )
    assert disk.num_syncs == 2, "what waited together is synced together"


def test_after_a_disk_has_failed_once_nothing_is_written_until_a_restart(tmp_path, monkeypatch):
    """The kernel forgets what it could not write: the next sync would succeed, with a gap."""
    url = f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    with running_ledger(url) as house:
        house.fund(UNITS)
        hold = house.reserve("r1", 10**8)
        disk = Disk(monkeypatch)
        disk.error = OSError(5, "Input/output error")
        disk.go.set()
        with pytest.raises(LedgerUnavailable, match="Input/output error"):
            house.ledger.settle(hold, USED, Outcome.FINISHED).result(10)
        disk.error = None
        for asked in (
            house.ledger.settle(hold, USED, Outcome.FINISHED),
            house.ledger.post(Deposit("acme", Kind.TOPUP, amount=1, reference="d", by="test")),
        ):
            with pytest.raises(LedgerUnavailable, match="restart the server"):
                asked.result(10)
        with pytest.raises(LedgerUnavailable, match="restart the server"):
            house.accounts.set_suspended("acme", True, by="test")
        assert "failed to write" in house.ledger.store.failed
    with running_ledger(url) as house:
        house.ledger.store.renew_log()
        assert house.ledger.settle(hold, USED, Outcome.FINISHED).result(10).repeated
        assert audit.verify(house.ledger.store).problems == []


def test_a_sync_of_sqlites_own_that_fails_closes_the_ledger_too(house, monkeypatch):
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC

    with monkeypatch.context() as patch:
        patch.setattr("billing.store.store.write_work", Mock(side_effect=error))
        with pytest.raises(LedgerUnavailable, match="failed to write"):
            house.reserve("r1", 1)
    with pytest.raises(LedgerUnavailable, match="restart the server"):
        house.reserve("r2", 1)


def test_what_holds_wrote_is_synced_without_money_moving(house, monkeypatch):
    disk = Disk(monkeypatch)
    disk.go.set()
    house.reserve("r1", 1)
    assert house.ledger.store.unsynced
    assert disk.entered.wait(10)


def lose_all(log: Path) -> None:
    for file in log.parent.glob("ledger.sqlite3*"):
        file.unlink()


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (lose_all, "ledger.sqlite3 was removed or replaced"),
        (Path.unlink, "was removed, replaced or cut short"),
        (lambda log: os.truncate(log, 0), "was removed, replaced or cut short"),
    ],
)
def test_files_that_are_removed_or_cut_close_the_ledger(tmp_path, lose, said):
    """What is written to a file without a name is gone with the process. The log is 32 MiB, and
    invites somebody who needs room. A killed server then lost every entry that was not copied yet,
    although it had served and billed as ever."""
    path = tmp_path / "ledger.sqlite3"
    with running_ledger(f"sqlite:///{path}") as house:
        house.ledger.store.renew_log()
        house.fund(UNITS)
        hold = house.reserve("r1", 10**8)
        lose(path.with_name(f"{path.name}-wal"))
        with pytest.raises(LedgerUnavailable, match=said):
            house.ledger.settle(hold, USED, Outcome.FINISHED).result(10)
        assert said in house.ledger.refuses
        with pytest.raises(LedgerUnavailable, match="restart the server"):
            house.reserve("r2", 1)


def test_a_damaged_ledger_is_written_no_further(tmp_path):
    """Commits to the log went on, and the server was ready: all that it booked was lost with the
    file at the next start."""
    path = tmp_path / "ledger.sqlite3"
    with running_ledger(f"sqlite:///{path}") as house:
        house.ledger.store.renew_log()
        house.fund(UNITS)
        house.ledger.store._commands_since_checkpoint = 10**6
        house.ledger.store.checkpoint()
        with path.open("r+b") as file:
            file.seek(8192)
            file.write(bytes(range(256)) * 16 * 40)
        with pytest.raises(LedgerUnavailable, match="malformed"):
            audit.verify(house.ledger.store)
        assert f"{path} is damaged (database disk image is malformed)" in house.ledger.refuses
        assert "restore a copy only if" in house.ledger.refuses
        with pytest.raises(LedgerUnavailable, match="is damaged"):
            house.reserve("r1", 1)


def test_a_closed_ledger_fails_on_while_nobody_asks(house):
    """A server that is not ready gets no requests, and its alert must not end meanwhile."""
    house.ledger.store._log.failed = "the disk failed"
    for _ in range(3):
        house.ledger._tick()
    assert 3 <= house.ledger.stats().failed_batches


def test_what_a_removed_log_had_is_saved_by_an_orderly_end(tmp_path):
    path = tmp_path / "ledger.sqlite3"
    with running_ledger(f"sqlite:///{path}") as house:
        house.ledger.store.renew_log()
        house.fund(UNITS)
        path.with_name(f"{path.name}-wal").unlink()
    assert 1 == proved(path)


def test_observers_hear_of_what_is_durable_and_in_order(tmp_path):
    heard: list[Entry] = []
    with running_ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}") as house:
        house.ledger._observers = (heard.extend,)
        house.fund(UNITS)
        holds = [house.reserve(f"r{number}", 10) for number in range(20)]
        for hold in holds:
            house.ledger.settle(hold, USED, Outcome.FINISHED)
    assert list(range(1, 22)) == [entry.seq for entry in heard]


def test_the_log_is_begun_anew_beside_a_writer(tmp_path):
    path = tmp_path / "ledger.sqlite3"
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(UNITS)
        sizes = []
        for turn in range(4):
            for number in range(100):
                house.charge(f"{turn}-{number}", Usage(miss=1))
            house.ledger.store._commands_since_checkpoint = 10**6
            house.ledger.store.checkpoint()
            sizes.append((tmp_path / "ledger.sqlite3-wal").stat().st_size)
        assert sizes[-1] < 1.5 * sizes[0], "a log that is never begun anew grows for ever"


def test_a_lengthened_log_is_read_like_any_other(tmp_path):
    """Zeros behind the frames are no frames, also for a process that finds them after a crash."""
    url, crashed = f"sqlite:///{tmp_path / 'ledger.sqlite3'}", tmp_path / "crashed"
    crashed.mkdir()
    with running_ledger(url) as house:
        house.ledger.store.renew_log()
        assert (tmp_path / "ledger.sqlite3-wal").stat().st_size >= WAL_BYTES
        index = (tmp_path / "ledger.sqlite3-shm").stat()
        pages = -(-WAL_BYTES // 4096)
        assert index.st_size >= -(-pages // 4096) * 32 << 10, "it need not grow on a full disk"
        assert index.st_blocks * 512 >= index.st_size, "nor has it holes"
        house.fund(UNITS)
        house.charge("r1", USED)
        for file in tmp_path.glob("ledger.sqlite3*"):
            if not file.name.endswith("-shm"):
                shutil.copy(file, crashed)
    assert 2 == proved(crashed / "ledger.sqlite3")


def test_the_logs_index_stays_in_use_and_as_long_as_it_was(tmp_path):
    """SQLite truncates an index that nobody has locked, and drops it with the last connection; each
    failed batch closes one. A server died of either (SIGBUS): when a command opened its ledger, and
    when it had to make the index anew on a full disk."""
    path = tmp_path / "ledger.sqlite3"
    index = path.with_name(f"{path.name}-shm")
    with running_ledger(f"sqlite:///{path}") as house:
        assert _in_use(path)
        house.ledger.store.renew_log()
        assert _in_use(path)
        house.fund(UNITS)
        with house.ledger.store.writing():
            assert _in_use(path)
        before = index.stat()
        for _ in range(5):
            with pytest.raises(OSError), house.ledger.store._batch(durable=True):
                raise OSError(errno.ENOSPC, "No space left on device")
            assert _in_use(path)
        assert (before.st_ino, before.st_size) == (index.stat().st_ino, index.stat().st_size)


def _in_use(database: Path) -> bool:
    """Whether another process finds SQLite's lock of whoever has the log's index open."""
    asked = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), 6, 1, 128)"  # EX | NB
    command = [sys.executable, "-I", "-c", asked, f"{database}-shm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode or "BlockingIOError" in done.stderr, done.stderr
    return done.returncode != 0


def test_a_ledger_starts_where_no_descriptor_can_be_listed(house, tmp_path, monkeypatch):
    """As in a chroot, or a container without /proc."""
    monkeypatch.setattr("billing.store.wal.DESCRIPTORS", tmp_path / "none")
    house.ledger.store.renew_log()
    house.fund(UNITS)
    assert house.account().balance == 2 * UNITS


def test_a_log_that_finds_no_room_says_how_much_it_needs(house, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("billing.store.wal.os.fsync", Mock(side_effect=disk_full()))
        with pytest.raises(LedgerUnavailable, match=r"-wal, which takes 32 MiB \(No space left"):
            house.ledger.store.renew_log()
    house.ledger.store.renew_log()
    house.reserve("r1", 1)


def test_a_full_disk_is_called_one_and_costs_nothing_once_there_is_room(house, monkeypatch, caplog):
    """SQLite says "disk I/O error" for it."""
    error = sqlite3.OperationalError("disk I/O error")
    with monkeypatch.context() as patch:
        patch.setattr("billing.store.wal.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        assert house.ledger.refuses == "", "while what it writes finds room, it serves"
        patch.setattr("billing.store.store.write_work", Mock(side_effect=error))
        with pytest.raises(LedgerUnavailable, match=r"disk I/O error \(the disk of .* is full"):
            house.reserve("r1", 1)
        assert "the ledger cannot be written: the disk of" in house.ledger.refuses
    assert house.ledger.refuses == ""
    assert "Traceback" not in caplog.text
    house.charge("r1", USED)
    assert audit.verify(house.ledger.store).problems == []


def test_a_full_disk_takes_the_reserve_first(house, monkeypatch, caplog):
    store = house.ledger.store
    store.renew_log()
    (reserve,) = Path(str(store.engine.url.database)).parent.glob("*-reserve")
    assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    free, write = [0], billing.store.store.write_work

    def write_if_there_is_room(*arguments: Any) -> Any:
        if reserve.exists():
            raise sqlite3.OperationalError("database or disk is full")
        return write(*arguments)

    with monkeypatch.context() as patch:
        usage = SimpleNamespace
        patch.setattr("billing.store.wal.shutil.disk_usage", lambda _: usage(free=free[0]))
        patch.setattr("billing.store.store.write_work", write_if_there_is_room)
        house.reserve("r1", 1)
        assert not reserve.exists() and "takes its reserve of 16 MiB" in caplog.text
        store.renew_log()
        assert not reserve.exists(), "the disk is still full"
        free[0] = 1 << 30
        store.renew_log()
        assert reserve.exists()
    house.charge("r2", USED)


@pytest.mark.parametrize("error", [sqlite3.OperationalError, sqlite3.DatabaseError])
def test_commits_that_fail_twice_refuse_until_one_succeeds(house, monkeypatch, caplog, error):
    """As on a file system that became read-only, or whose disk returns errors."""

    fail = Mock(side_effect=error("attempt to write a readonly database"))

    def probe() -> None:
        house.ledger.store.retrying(fail)

    with monkeypatch.context() as patch:
        patch.setattr("billing.store.store.write_work", fail)
        patch.setattr(house.ledger.store, "probe", probe)
        with pytest.raises(LedgerUnavailable):
            house.reserve("r1", 1)
        with pytest.raises(LedgerUnavailable):
            house.reserve("r2", 1)
        said = "the ledger cannot be written: attempt to write a readonly database"
        assert said == house.ledger.refuses
        for _ in range(3):
            house.ledger._tick()
        assert 1 == caplog.text.count("was not swept"), "not every second"
        assert 5 == house.ledger.stats().failed_batches, "or its alert would end while it lasts"
        house.ledger.store.retrying(lambda connection: None)
        assert said == house.ledger.refuses, "what changes nothing needs no disk"
    house.ledger._tick()  # no request comes to a server that is not ready
    assert "" == house.ledger.refuses
    assert "Traceback" not in caplog.text


def test_rows_that_the_database_refuses_do_not_close_the_ledger(house):
    refuse = Mock(side_effect=sqlite3.IntegrityError("UNIQUE constraint failed"))
    for _ in range(3):
        with pytest.raises(LedgerUnavailable):
            house.ledger.store.retrying(refuse)
    assert "" == house.ledger.refuses


def test_a_store_without_its_log_is_durable_already(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    store.close()  # the last connection copies the log into the database
    assert not (tmp_path / "ledger.sqlite3-wal").exists()
    store.sync()


def test_an_answer_that_comes_after_the_loop_has_ended_harms_nobody(caplog):
    future: Future[None] = Future()

    async def leave() -> None:
        waiter = asyncio.create_task(durable(future))
        await asyncio.sleep(0)  # it waits now
        waiter.cancel()
        await asyncio.wait([waiter])

    asyncio.run(leave())
    assert not future.cancelled()
    future.set_result(None)
    assert [] == caplog.records


def proved(path: Path) -> int:
    """The number of entries of a ledger that is as it should be."""
    with closing(open_store(f"sqlite:///{path}")) as store:
        proof = audit.verify(store)
    assert proof.problems == []
    return proof.num_entries
