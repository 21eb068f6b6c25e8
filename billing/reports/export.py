"""Passes the entries that are new since the last export of a name to other systems.

An export stores its position in each tenant's chain; the chains are the outbox. It advances after
its sink has accepted a chunk, so after a crash a chunk may be sent again but is never skipped (at
least once). Ids are stable (`tenant/number`), and the receiver drops repeated ones.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from billing.errors import ExportError
from billing.gate.entries import Entry
from billing.store import reports as store_reports
from billing.store.store import LedgerStore

CHUNK = 1_000

Sink = Callable[[list[Entry]], None]


def drain(store: LedgerStore, name: str, sink: Sink) -> int:
    """Passes every entry after this export's position to `sink`, in chunks. Returns their number.

    `sink` returns once the chunk is stored. If it raises, the position stays before that chunk.
    """
    with store.reading() as connection:
        positions = store_reports.cursors(connection, name)
        accounts = store_reports.all_accounts(connection)
    sent = 0
    for tenant, account in accounts.items():
        position = positions.get(tenant, 0)
        while position < account.seq:
            found = _chunk(store, tenant, position)
            sink(found)
            position = found[-1].seq
            store_reports.advance(store, name, {tenant: position})
            sent += len(found)
    return sent


def _chunk(store: LedgerStore, tenant: str, after: int) -> list[Entry]:
    with store.reading() as connection:
        last = after + CHUNK
        return list(store_reports.stream_entries(connection, tenant, after=after, until=last))


@contextmanager
def appending(path: Path) -> Iterator[BinaryIO]:
    """Opens a file exclusively, to append whole lines. A line torn by a crash is cut off first.

    Raises `ExportError` if it cannot be written or another export is writing it.
    """
    try:
        with path.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ExportError(f"another export is writing {path}; wait until it ends") from None
            file.truncate(_whole_lines(file))
            yield file
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error


def _whole_lines(file: BinaryIO) -> int:
    """The length of a file up to its last newline."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - 65_536)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def write_durably(file: BinaryIO, data: bytes) -> None:
    """Appends the bytes; returns once they are on the disk."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def entry_id(entry: Entry) -> str:
    """A permanent id: the tenant and the number in its chain."""
    return f"{entry.tenant}/{entry.seq}"
