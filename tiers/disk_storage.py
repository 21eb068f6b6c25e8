"""The operating system and LMDB, as the disk tier calls them: one small seam for faults.

Everything that can fail for a reason outside the program goes through a `Storage`. Each method
first says its own name to `before`, which does nothing here; `tiers.testing` overrides it to fail
the Nth call or to kill the process at a named point of a write.
"""

import os
from pathlib import Path
from typing import Any

import lmdb

MAX_READERS = 512
NUM_DATABASES = 8

StorageError = (lmdb.Error, OSError)
MapFull = lmdb.MapFullError
NotAnEnvironment = (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError)
Panic = lmdb.PanicError

Environment = Any  # lmdb ships no types
Transaction = Any
Database = Any


class Storage:
    """The real thing. Stateless; one instance serves every thread."""

    def before(self, operation: str) -> None:
        """Called with an operation's name before it runs; a hook for tests."""

    def open_env(self, path: Path, *, map_bytes: int, readonly: bool) -> Environment:
        """Open one LMDB environment without a fsync per commit and without its readahead."""
        self.before("open_env")
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
        """A value of a write transaction, in place; gone when it ends or writes again."""
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

    def open_file(self, path: Path) -> int:
        self.before("open_file")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def stat(self, fd: int) -> os.stat_result:
        self.before("stat")
        return os.fstat(fd)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill `into` from `offset`; returns the bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(into):
            self.before("read")
            count = os.preadv(fd, [into[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def will_need(self, fd: int, offset: int, nbytes: int) -> None:
        """Tell the kernel to start reading this extent."""
        self.before("will_need")
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
