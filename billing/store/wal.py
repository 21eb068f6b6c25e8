"""SQLite's write-ahead log as a file, synced separately from its commits.

A failed disk write is reported once, to processes that have the file open. The kernel then treats
the lost data as written, so the next sync succeeds, and every commit after the gap would be lost at
a power cut. So the first failure is final: nothing is written until a server restarts and rewrites
the log (`renew`). One thread syncs; any thread may report a failure.
"""

import errno
import logging
import os
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

from billing.errors import LedgerUnavailable

logger = logging.getLogger(__name__)

WAL_BYTES = 32 << 20
RESERVE_BYTES = 16 << 20  # given up when the disk is full, for some thousand charges
INDEX_BYTES = 96 << 10  # of the log's index: 32 KiB per 4,096 pages, for 8,144 pages and more
ROOM_BYTES = 256 << 10  # a disk with less counts as full
READ_BYTES = 1 << 20
DESCRIPTORS = Path("/dev/fd")  # those of this process, by number
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SYNC_FAILED = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # the low byte of extended codes


class WriteAheadLog:
    """The log of one database file. After a failure `failed` says why nothing can be written."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = Path(f"{database}-wal")
        self._index = Path(f"{database}-shm")
        self._reserve = Path(f"{database}-reserve")
        self._file_id = _file_id(database)
        self._handle: int | None = None
        self._renewed: tuple[int, int] | None = None  # the log that `renew` has lengthened
        self.unsynced = False  # whether anything was committed since the last sync
        self.failed = ""

    def check(self) -> None:
        """Raises `LedgerUnavailable` if nothing can be written any more."""
        if self.failed:
            raise LedgerUnavailable(
                f"the ledger is closed: {self.failed}; fix it, then restart the server"
            )

    @property
    def full_disk(self) -> str:
        """A message if the disk is full, else empty: a write of a few pages has room."""
        folder = self._database.parent
        try:
            free = shutil.disk_usage(folder).free
        except OSError:
            return ""
        return f"the disk of {folder} is full: free some" if free < ROOM_BYTES else ""

    def note(self, error: Exception) -> None:
        """Records an error of SQLite. A failed sync of its own is as final as one of ours, and
        so is a damaged file: what is written on it may never be read again. Where the disk is
        full, the reserve makes room."""
        if full := self.full_disk:
            self._give_up_reserve(full)
        cause = getattr(error, "orig", error)
        code = getattr(cause, "sqlite_errorcode", None)
        if code in _SYNC_FAILED:
            self.failed = f"the disk failed to write {self._path} ({cause})"
        elif code is not None and code & 0xFF in _DAMAGED:
            fault = self._device_fault()
            self.failed = (
                f"the disk of {self._database} failed ({fault}), and the file on it may be whole: "
                "mend the disk or mount it again, and restore no copy, which lacks newer charges"
                if fault
                else f"{self._database} is damaged ({cause}): end the server, run `cachesvc ledger "
                "verify`, and restore a copy only if that fails too"
            )

    def _device_fault(self) -> str:
        """What the system answers to a read of the files; empty if they can be read. SQLite calls a
        file damaged if its device is lost. Reads through SQLite's own descriptors: closing another
        would drop its locks."""
        try:
            for path in (self._database, self._path):
                handle, at = _descriptor_of(path), 0
                while handle is not None and (data := os.pread(handle, READ_BYTES, at)):
                    at += len(data)
        except OSError as error:
            return os.strerror(error.errno or errno.EIO)
        return ""

    def keep_reserve(self) -> None:
        """Takes the room of the reserve, if the disk has it twice."""
        with suppress(OSError):
            if (
                self._reserve.exists()
                or shutil.disk_usage(self._reserve.parent).free < 2 * RESERVE_BYTES
            ):
                return
            with self._reserve.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def _give_up_reserve(self, why: str) -> None:
        with suppress(OSError):
            self._reserve.unlink()
            logger.warning(
                f"{why}; meanwhile the ledger takes its reserve of {RESERVE_BYTES >> 20} MiB"
            )

    def sync(self) -> None:
        """Makes all commits so far durable, as SQLite itself does with synchronous=FULL.

        Raises OSError or `LedgerUnavailable`. After that every call does.
        """
        self.check()
        self.unsynced = False
        try:
            handle = self._open()
            if handle is not None:
                os.fdatasync(handle)
        except OSError as error:
            self.failed = f"the disk failed to write {self._path} ({error})"
            raise
        if _file_id(self._database) != self._file_id:
            self.failed = f"{self._database} was removed or replaced while the server ran"
            self.check()
        if self._renewed and not self._is_whole():
            self.failed = (
                f"{self._path} was removed, replaced or cut short while the server ran; if it was "
                f"removed, SIGTERM saves what was in it, and SIGKILL loses that"
            )
            self.check()

    def _is_whole(self) -> bool:
        """Whether the log is where `renew` left it, at least as long: SQLite never shortens it
        while a connection is open."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._renewed and found.st_size >= WAL_BYTES

    def renew(self) -> None:
        """Rewrites the log and extends it with zeros to its length between checkpoints.

        For a server, once at its start, while nobody else writes. Data that a failing disk lost may
        still be in memory and is written again. Zeros are not valid frames. A sync within a file's
        length waits only for its data. A sync that extends the file also waits for the file
        system's journal, and so for other writers: 0.14 against 0.37 ms (ext4), and many times more
        with other writers.

        The log's index is extended here too. On a full disk it could not grow after a commit had
        been written: SQLite reported a failure, but a later reader of the log found the commit. A
        connection of this process must be open, because the index is written through its
        descriptor.

        Raises `LedgerUnavailable` if the disk has no room.
        """
        try:
            with self._path.open("r+b") as file:
                frames = file.read()
                file.seek(0)
                file.write(frames.ljust(WAL_BYTES, b"\0"))
                file.flush()
                os.fsync(file.fileno())
            self._lengthen_index()
            self._renewed = _file_id(self._path)
            self.keep_reserve()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise LedgerUnavailable(
                f"there is no room for the ledger's log {self._path}, which takes "
                f"{WAL_BYTES >> 20} MiB ({os.strerror(error.errno)}); free some on that disk, or "
                f"move the data directory to another"
            ) from error

    def _lengthen_index(self) -> None:
        """Extends the index through the descriptor that SQLite has open.

        Opening and closing the index separately would drop every lock of this process on it
        (POSIX). The next process would then believe it is the only one and truncate the index under
        this one's mapping. If no descriptor is found, as in a chroot without /proc, the index grows
        only when SQLite needs it.
        """
        index = _descriptor_of(self._index)
        if index is None:
            return
        length = os.fstat(index).st_size
        if length < INDEX_BYTES:
            os.pwrite(index, bytes(INDEX_BYTES - length), length)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int | None:
        """The log's handle, kept open so that it reports write failures.

        None if there is no log: the last connection was closed, and all data is in the database,
        synced.
        """
        if self._handle is not None and os.fstat(self._handle).st_nlink == 0:
            self.close()
        if self._handle is None:
            try:
                self._handle = os.open(self._path, os.O_RDONLY)
            except FileNotFoundError:
                return None
        return self._handle


def _descriptor_of(path: Path) -> int | None:
    """A descriptor that this process has open for the file; None where none can be found."""
    wanted = _file_id(path)
    try:
        descriptors = list(DESCRIPTORS.iterdir())
    except OSError:
        return None
    for each in descriptors:
        with suppress(OSError):  # descriptors closed meanwhile
            found = os.fstat(int(each.name))
            if (found.st_dev, found.st_ino) == wanted:
                return int(each.name)
    return None


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
