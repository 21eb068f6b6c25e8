"""Entries of `acme` changed behind the ledger's back, with a chain of hashes that holds."""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from billing.gate.entries import digest, genesis

FIELDS = ("tenant", "seq", "kind", "request_id", "at_ns", "currency", "postings", "body")


@contextmanager
def forging(path: Path) -> Iterator[sqlite3.Connection]:
    """What the block changes of entries stands in the chain afterwards, up to its head."""
    with closing(sqlite3.connect(path)) as plain:
        plain.execute("DROP TRIGGER entries_no_update")
        yield plain
        rechain(plain)
        plain.commit()


def rechain(plain: sqlite3.Connection) -> None:
    """Make every hash anew, and the account's head."""
    head = genesis("acme")
    found = f"SELECT {', '.join(FIELDS)} FROM entries WHERE tenant = 'acme' ORDER BY seq"
    for row in plain.execute(found).fetchall():
        head = digest(head, *row)
        plain.execute(
            "UPDATE entries SET hash = ? WHERE seq = ? AND tenant = 'acme'", (head, row[1])
        )
    plain.execute("UPDATE accounts SET head = ? WHERE tenant = 'acme'", (head,))


def replace_in(
    plain: sqlite3.Connection, column: str, changes: Mapping[str, str], **where: str | int
) -> None:
    """Replace texts in a column of one entry, which must have them."""
    [(name, value)] = where.items()
    for old, new in changes.items():
        statement = f"UPDATE entries SET {column} = replace({column}, ?, ?)"
        entry = f"WHERE tenant = 'acme' AND {name} = ? AND instr({column}, ?)"
        done = plain.execute(f"{statement} {entry}", (old, new, value, old))
        assert 1 == done.rowcount, (old, where)
