"""A folder being written, which replaces nothing until it is whole.

Its process locks it. One whose lock is free was left by a process that was killed: half a gigabyte
for the default model, and nobody else would remove it.

What is kept in such a folder may be executed later, so it also says whether another user could have
written a file.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def partial_folder(folder: Path, family: str) -> Iterator[Path]:
    """A new folder beside `folder`, to be renamed to it; removed at the end if it is still there.

    First removes what killed processes left of the folders whose names begin with `family`.
    """
    start = f".{family}"
    for left in folder.parent.glob(f"{start}*"):
        _remove_left(left)
    partial, handle = _make(folder)
    try:
        yield partial
    finally:
        os.close(handle)
        shutil.rmtree(partial, ignore_errors=True)


def keeps_others_out(folder: Path) -> bool:
    """Whether nobody but this user and root can replace its files."""
    status = folder.stat()
    by_all = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    return status.st_uid in (0, os.geteuid()) and not by_all


def is_own(status: os.stat_result) -> bool:
    """Whether a file of this status is only this user's, or root's, to write."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _make(folder: Path) -> tuple[Path, int]:
    """A new folder, locked by its open handle."""
    while True:
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        handle = os.open(partial, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if partial.exists():
            return partial, handle
        os.close(handle)  # another process took it for one that was left


def _remove_left(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # its process has renamed it meanwhile
        return
    try:
        if _locks(handle):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _locks(handle: int) -> bool:
    """Whether nobody else has it locked. False where a file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
