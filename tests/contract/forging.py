"""Entries of `acme` changed behind the ledger's back, with chains of hashes that hold."""

import sqlite3
from contextlib import closing, contextmanager

from billing.gate.entries import digest, genesis
from billing.proof import audit
from billing.store import trail as store_trail
from billing.store.opening import open_store

FIELDS = ("tenant", "seq", "kind", "request_id", "at_ns", "currency", "postings", "body")
TRAIL = ("seq", "at_ns", "actor", "action", "subject", "before", "after", "reason")
Sql = sqlite3.Connection


def copy(source, target):
    with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
        one.backup(other)
    return target


@contextmanager
def forging(path, *, rehashed=True):
    """What the block changes stands in the chains afterwards, up to the account's head."""
    with closing(sqlite3.connect(path)) as plain:
        for (trigger,) in plain.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
            plain.execute(f"DROP TRIGGER {trigger}")
        yield plain
        if rehashed:
            rechain(plain)
        plain.commit()


def rechain(plain):
    """Make every hash anew, of entries and of the trail, and the account's head."""
    head = genesis("acme")
    found = f"SELECT {', '.join(FIELDS)} FROM entries WHERE tenant = 'acme' ORDER BY seq"
    for row in plain.execute(found).fetchall():
        head = digest(head, *row)
        plain.execute(
            "UPDATE entries SET hash = ? WHERE seq = ? AND tenant = 'acme'", (head, row[1])
        )
    plain.execute("UPDATE accounts SET head = ? WHERE tenant = 'acme'", (head,))
    head = store_trail.TRAIL_GENESIS
    for row in plain.execute(f"SELECT {', '.join(TRAIL)} FROM trail ORDER BY seq").fetchall():
        head = store_trail.trail_hash(head, dict(zip(TRAIL, row, strict=True)))
        plain.execute("UPDATE trail SET hash = ? WHERE seq = ?", (head, row[0]))


def change(plain, statement):
    """A statement that changes one row."""
    assert plain.execute(statement).rowcount == 1, statement


def problems(path, *, rebuilt=False, heads=()):
    """What the proof finds; once balances and rollups are derived again, if the forger did so."""
    with closing(open_store(f"sqlite:///{path}")) as store:
        if rebuilt:
            audit.rebuild(store)
        return audit.verify(store, heads=heads).problems
