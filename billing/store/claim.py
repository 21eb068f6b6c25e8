"""A server's name on a ledger, held while it runs: no two servers settle each other's holds.

On SQLite a locked file beside the database, on PostgreSQL an advisory lock of a session of its own:
both end with the process that holds them. A host that vanished is noticed by the database within
half a minute, which is how long a start waits for its name.
"""

import fcntl
import logging
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Engine, text

from billing.errors import StoreError

log = logging.getLogger(__name__)

CLAIMS = 4_715_015  # the first half of the advisory lock's number; the same in every process
WAIT_S = 40.0
_NOTICE = (("tcp_keepalives_idle", 10), ("tcp_keepalives_interval", 5), ("tcp_keepalives_count", 3))

Release = Callable[[], None]


def claim(engine: Engine, owner: str, *, wait_s: float = WAIT_S) -> Release:
    """Take the name; gives what ends it. Raises `StoreError` where another server has it."""
    release = _lock_file(engine, owner) if _is_sqlite(engine) else _lock_row(engine, owner, wait_s)
    if release is None:
        raise StoreError(
            f"another server runs as {owner!r} on this ledger; stop it, or give each server a "
            "billing.server_name of its own"
        )
    return release


def _is_sqlite(engine: Engine) -> bool:
    return engine.dialect.name == "sqlite"


def _lock_file(engine: Engine, owner: str) -> Release | None:
    path = Path(f"{engine.url.database}-{quote(owner, safe='')}.lock")
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file.close


def _lock_row(engine: Engine, owner: str, wait_s: float) -> Release | None:
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    for name, value in _NOTICE:
        connection.execute(text(f"SET {name} = {value}"))
    number = zlib.crc32(owner.encode()) - 2**31  # the second half, an int4
    ours = text(f"SELECT pg_try_advisory_lock({CLAIMS}, {number})")
    deadline = time.monotonic() + wait_s
    while not connection.scalar(ours):
        if time.monotonic() >= deadline:
            connection.invalidate()
            connection.close()
            return None
        log.warning("another server runs as %r on this ledger, or did; waiting for it", owner)
        time.sleep(min(5.0, wait_s))

    def release() -> None:
        connection.invalidate()  # ends the session, and the lock with it
        connection.close()

    return release
