"""The admin trail as rows: who did what, before, after and why. Append-only and chained by hash.

Written in the transaction of the change itself.
"""

import hashlib
from typing import Any

import orjson
from sqlalchemy import Connection, func, select
from sqlalchemy.engine import RowMapping

from billing.store.schema import trail

TRAIL_GENESIS = hashlib.sha256(b"cachesvc.trail.v1").digest()
TRAIL_LOCK = 4_715_014  # any number of ours, the same in every process


def add_trail(
    connection: Connection,
    *,
    at_ns: int,
    actor: str,
    action: str,
    subject: str,
    before: Any,
    after: Any,
    reason: str,
) -> int:
    """Appends to the admin trail, chained by hash: actor, action, subject, values before and
    after. Returns the entry's number."""
    lock_trail(connection)
    last, head = last_hash(connection)
    values = {
        "seq": last + 1,
        "at_ns": at_ns,
        "actor": actor,
        "action": action,
        "subject": subject,
        "before": _json(before),
        "after": _json(after),
        "reason": reason,
    }
    connection.execute(trail.insert().values(values | {"hash": trail_hash(head, values)}))
    return last + 1


def last_hash(connection: Connection) -> tuple[int, bytes]:
    """Number and hash of the last row; 0 if there is none."""
    query = select(trail.c.seq, trail.c.hash).order_by(trail.c.seq.desc()).limit(1)
    last = connection.execute(query).first()
    return (last.seq, last.hash) if last else (0, TRAIL_GENESIS)


def trail_hash(before: bytes, values: Any) -> bytes:
    """The hash of a trail row that follows the one with hash `before`."""
    names = ("seq", "at_ns", "actor", "action", "subject", "before", "after", "reason")
    return hashlib.sha256(before + orjson.dumps([values[name] for name in names])).digest()


def trail_rows(connection: Connection) -> list[RowMapping]:
    """The whole trail, oldest first."""
    return list(connection.execute(select(trail).order_by(trail.c.seq)).mappings())


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def lock_trail(connection: Connection) -> None:
    """Allows one writer of the trail at a time; SQLite has only one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(TRAIL_LOCK)))
