"""A server's exclusive name on a ledger, so that no two servers settle each other's holds.

On SQLite it is a locked file beside the database, on PostgreSQL an advisory lock of a separate
session. Both end with their process. The database notices a vanished host within half a minute, and
a start waits that long for its name. A restart of PostgreSQL ends the session too, so a server
looks each second whether its name is still its own.
"""

import fcntl
import logging
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import quote

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from billing.errors import StoreError

log = logging.getLogger(__name__)

CLAIMS = 4_715_015  # first half of the advisory lock's number, the same in every process
WAIT_S = 40.0
_NOTICE = (("tcp_keepalives_idle", 10), ("tcp_keepalives_interval", 5), ("tcp_keepalives_count", 3))


class Claim(Protocol):
    """A name that is held."""

    def is_lost(self) -> bool:
        """Whether another server has the name now. Raises the driver's errors while it cannot be
        known."""

    def release(self) -> None: ...


def claim(engine: Engine, owner: str, *, wait_s: float = WAIT_S) -> Claim:
    """Take the name. Raises `StoreError` where another server has it."""
    if engine.dialect.name == "sqlite":
        held: Claim | None = _FileClaim.take(engine, owner)
    else:
        held = _SessionClaim.take(engine, owner, wait_s)
    if held is None:
        raise StoreError(
            f"another server runs as {owner!r} on this ledger; stop it, or give each server a "
            "billing.server_name of its own"
        )
    return held


@dataclass(frozen=True, slots=True)
class _FileClaim:
    """Ends with the process, and never before."""

    file: IO[str]

    @classmethod
    def take(cls, engine: Engine, owner: str) -> "_FileClaim | None":
        path = Path(f"{engine.url.database}-{quote(owner, safe='')}.lock")
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            file.close()
            raise StoreError(
                f"{path} cannot be locked ({error.strerror}): its file system has no locks, as "
                "some network mounts have none; keep the ledger on a local disk, or in PostgreSQL"
            ) from error
        return cls(file)

    def is_lost(self) -> bool:
        return False

    def release(self) -> None:
        self.file.close()


@dataclass(slots=True)
class _SessionClaim:
    """Ends with its session: when the database restarts or fails over, long before the server."""

    engine: Engine
    number: int  # the second half of the lock's, an int4
    session: Connection | None = None  # None while the database cannot be reached

    @classmethod
    def take(cls, engine: Engine, owner: str, wait_s: float) -> "_SessionClaim | None":
        held = cls(engine, zlib.crc32(owner.encode()) - 2**31)
        deadline = time.monotonic() + wait_s
        while not held._locks():
            if time.monotonic() >= deadline:
                held.release()
                return None
            log.warning("another server runs as %r on this ledger, or did; waiting for it", owner)
            time.sleep(min(5.0, wait_s))
        return held

    def is_lost(self) -> bool:
        """The name is taken again where the session has ended and nobody else has it."""
        if self.session is not None:
            try:
                self.session.scalar(text("SELECT 1"))
            except DBAPIError:
                self.release()
            else:
                return False
        if not self._locks():
            return True
        log.warning("the database ended the session that held this server's name; taken again")
        return False

    def release(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.invalidate()  # ends the session, and the lock with it
            session.close()

    def _locks(self) -> bool:
        if self.session is None:
            self.session = _session(self.engine)
        ours = text(f"SELECT pg_try_advisory_lock({CLAIMS}, {self.number})")
        return bool(self.session.scalar(ours))


def _session(engine: Engine) -> Connection:
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    for name, value in _NOTICE:
        connection.execute(text(f"SET {name} = {value}"))
    return connection
