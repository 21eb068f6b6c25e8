"""The disk tier's calls to the operating system and LMDB: one small seam for injecting faults.

Everything that can fail for an external reason goes through a `Storage`. Each method first calls
`before` with its own name, which does nothing here. `tests.support.faulty_storage` overrides it to
fail the Nth call or to kill the process at a named point of a write.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

MAX_READERS = 512
LOCK_BYTES = MAX_READERS * 64 + mmap.PAGESIZE  # of lock.mdb: 64 per reader, and its head
NUM_DATABASES = 8

StorageError = (lmdb.Error, OSError)
MapFull = lmdb.MapFullError
NoMemory = lmdb.MemoryError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
O_DIRECT = getattr(os, "O_DIRECT", 0)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of fallocate

_LIBC = ctypes.CDLL(None, use_errno=True)

Environment = Any  # lmdb ships no types
Transaction = Any
Database = Any


class FileSystem(NamedTuple):
    """Bytes of a file system in all, and those that a user without privileges may still write."""

    total: int
    free: int


def is_doubtful(error: BaseException) -> bool:
    """Whether damaged pages may be the cause: of every error of LMDB, unless the map is full or the
    system refuses a call. A page with a wild number fails as an invalid argument."""
    if not isinstance(error, lmdb.Error) or isinstance(error, (MapFull, NoMemory)):
        return False
    code = getattr(error, "code", 0) or 0
    return code <= 0 or code == errno.EINVAL


class DataFile(NamedTuple):
    """Two descriptors of one file: through the page cache and, if possible, bypassing it."""

    cached: int
    direct: int | None


class Storage:
    """The real implementation. Stateless; one instance serves every thread."""

    def before(self, operation: str) -> None:
        """Called with an operation's name before it runs; a hook for tests."""

    def open_env(self, path: Path, *, map_bytes: int, readonly: bool) -> Environment:
        """Open one LMDB environment without a fsync per commit and without its readahead."""
        self.before("open_env")
        if not readonly:
            _reserve_lock(path / "lock.mdb")
        return lmdb.open(
            str(path),
            map_size=map_bytes,
            readonly=readonly,
            create=not readonly,
            sync=False,
            readahead=False,
            max_readers=MAX_READERS,
            max_dbs=NUM_DATABASES,
            max_spare_txns=8,
            meminit=False,
        )

    def begin(self, env: Environment, *, write: bool) -> Transaction:
        self.before("begin_write" if write else "begin_read")
        return env.begin(write=write, buffers=write)

    def get(self, txn: Transaction, key: bytes, db: Database) -> bytes | None:
        self.before("get")
        value = txn.get(key, db=db)
        return None if value is None else bytes(value)

    def view(self, txn: Transaction, key: bytes, db: Database) -> memoryview:
        """A value of a write transaction, in place; invalid once it ends or writes again."""
        self.before("view")
        value: memoryview = txn.get(key, db=db)
        return value

    def put(self, txn: Transaction, key: bytes, value: object, db: Database) -> None:
        self.before("put")
        txn.put(key, value, db=db)

    def delete(self, txn: Transaction, key: bytes, db: Database) -> bool:
        self.before("delete")
        return bool(txn.delete(key, db=db))

    def commit(self, txn: Transaction) -> None:
        self.before("commit")
        txn.commit()
        self.before("committed")

    def sync(self, env: Environment) -> None:
        self.before("sync")
        env.sync(True)

    def open_file(self, path: Path) -> DataFile:
        """Opens a file for reads that bypass LMDB and, if possible, the page cache."""
        self.before("open_file")
        cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return DataFile(cached, os.open(path, os.O_RDONLY | os.O_CLOEXEC | O_DIRECT))
        except OSError:
            return DataFile(cached, None)  # e.g. tmpfs

    def close_file(self, file: DataFile) -> None:
        for fd in file:
            if fd is not None:
                os.close(fd)

    def stat(self, file: DataFile) -> os.stat_result:
        self.before("stat")
        return os.fstat(file.cached)

    def read(self, file: DataFile, into: memoryview, offset: int) -> int:
        """Fill `into` from `offset`; returns the bytes read, fewer only at the end of the file.

        `offset`, length and memory are page-aligned. Data in the page cache is copied from it.
        Other data is read directly, which takes a quarter of the CPU and leaves the cache to
        others, because a loaded block is now in a hotter tier.
        """
        self.before("read")
        if file.direct is None:
            return _read_all(file.cached, into, offset)
        try:
            count = os.preadv(file.cached, [into], offset, os.RWF_NOWAIT)
        except OSError:  # EAGAIN: not cached; EOPNOTSUPP: not supported by the file system
            count = 0
        return count if count == len(into) else _read_all(file.direct, into, offset)

    def peek(self, file: DataFile, nbytes: int, offset: int) -> bytes:
        """Reads a few bytes through the page cache."""
        self.before("peek")
        return os.pread(file.cached, nbytes, offset)

    def patch(self, path: Path, data: bytes, offset: int) -> None:
        self.before("patch")
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    def file_system(self, path: Path) -> FileSystem:
        self.before("file_system")
        found = os.statvfs(path)
        return FileSystem(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def punch(self, path: Path, spans: Iterable[tuple[int, int]]) -> None:
        """Gives parts (offset, bytes) of a file back, which takes no room. They read as zeros."""
        self.before("punch")
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for span in spans:
                how = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE)
                if _LIBC.fallocate(fd, how, *map(ctypes.c_int64, span)):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(fd)

    def will_need(self, file: DataFile, offset: int, nbytes: int) -> None:
        """Asks the kernel to start reading this extent, if it goes through the page cache."""
        self.before("will_need")
        if file.direct is None:
            os.posix_fadvise(file.cached, offset, nbytes, os.POSIX_FADV_WILLNEED)


def _reserve_lock(path: Path) -> None:
    """Give LMDB's file of locks and readers its room: LMDB makes it sparse and maps it, and on a
    full disk the first write to a page of it would end the process (SIGBUS). Raises OSError where
    there is no room; LMDB says what else is wrong with the file.

    Only while this process has the shard closed: to close the file here would drop LMDB's locks.
    """
    try:
        with path.open("ab") as file:
            if file.tell() < LOCK_BYTES:
                os.posix_fallocate(file.fileno(), 0, LOCK_BYTES)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise


class PageBuffer:
    """Page-aligned memory for one record, as direct reads require. Grows to the largest record
    requested, and belongs to one thread at a time."""

    def __init__(self) -> None:
        self._view = memoryview(mmap.mmap(-1, mmap.PAGESIZE))

    def take(self, nbytes: int) -> memoryview:
        """At least `nbytes`; the same memory as in the previous call."""
        if len(self._view) < nbytes:
            whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            self._view = memoryview(mmap.mmap(-1, whole))
        return self._view


def _read_all(fd: int, into: memoryview, offset: int) -> int:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
