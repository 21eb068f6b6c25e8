"""SQLite's write-ahead log as a file: synced apart from the commits that wrote it.

A disk that fails to write says so once, to those who have the file open, and the kernel then takes
what it lost for written: the next sync succeeds, and every commit after the gap is lost with it at
a power cut. So the first failure is the last word: nothing is written from then on, until a server
starts anew and writes the log again (`renew`). One thread syncs; any thread may tell a failure.
"""

import errno
import os
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

from billing.errors import LedgerUnavailable

WAL_BYTES = 32 << 20
INDEX_BYTES = 96 << 10  # of the log's index: 32 KiB for each 4,096 of its 8,144 pages, and more
ROOM_BYTES = 256 << 10  # a disk with less has none for the ledger
DESCRIPTORS = Path("/dev/fd")  # those of this process, by number
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SYNC_FAILED = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)


class WriteAheadLog:
    """The log of one database file. `failed` says why nothing can be written, once that is so."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = Path(f"{database}-wal")
        self._index = Path(f"{database}-shm")
        self._file_id = _file_id(database)
        self._handle: int | None = None
        self.unsynced = False  # whether anything was committed since the last sync
        self.failed = ""

    def check(self) -> None:
        """Raises `LedgerUnavailable` where nothing can be written any more."""
        if self.failed:
            raise LedgerUnavailable(
                f"the ledger is closed: {self.failed}; fix it, then restart the server"
            )

    @property
    def full_disk(self) -> str:
        """That the disk is full, in words; empty while a write of a few pages finds room."""
        folder = self._database.parent
        try:
            free = shutil.disk_usage(folder).free
        except OSError:
            return ""
        return f"the disk of {folder} is full: free some" if free < ROOM_BYTES else ""

    def note(self, error: Exception) -> None:
        """Take in what SQLite says: a sync of its own that failed is as final as one of ours."""
        cause = getattr(error, "orig", error)
        if getattr(cause, "sqlite_errorcode", None) in _SYNC_FAILED:
            self.failed = f"the disk failed to write {self._path} ({cause})"

    def sync(self) -> None:
        """Make durable what was committed so far: what SQLite does itself with synchronous=FULL.

        Raises OSError or `LedgerUnavailable`, and so does everything after it.
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

    def renew(self) -> None:
        """Write the log again, at the length it gets between checkpoints; zeros are no frames.

        For a server, once at its start, while nobody else writes. What a failing disk lost may
        still be in memory, and is written now. A sync within a file's length waits for its data
        alone; one that lengthens it waits for the file system's journal, and so for whoever else
        writes there: 0.14 against 0.37 ms (ext4), and many times that where others write.

        So does the log's index get its room now. On a full disk it could not grow after a commit
        was written: SQLite called that failed, and whoever read the log anew found it there. A
        connection of this process must be open: the index is reached through its descriptor.

        Raises `LedgerUnavailable` where there is no room for it.
        """
        try:
            with self._path.open("r+b") as file:
                frames = file.read()
                file.seek(0)
                file.write(frames.ljust(WAL_BYTES, b"\0"))
                file.flush()
                os.fsync(file.fileno())
            self._lengthen_index()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise LedgerUnavailable(
                f"there is no room for the ledger's log {self._path}, which takes "
                f"{WAL_BYTES >> 20} MiB ({os.strerror(error.errno)}); free some on that disk, or "
                f"move the data directory to another"
            ) from error

    def _lengthen_index(self) -> None:
        """Through the descriptor that SQLite has open. To open the index and close it again would
        drop every lock that this process has on it (POSIX): the next process to come would take
        itself for the only one and cut it to nothing, under the mapping of this one. Where no
        descriptor can be found, as in a chroot without /proc, it grows when SQLite needs it.
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
        """The log's handle, kept open so that it hears of failures. None where there is no log:
        the last connection was closed, and all is in the database, synced."""
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
        with suppress(OSError):  # of those that were closed meanwhile
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
