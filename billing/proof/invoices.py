"""Proves the invoices: numbers have no gaps, and rows match the admin trail exactly."""

from collections.abc import Iterator

import orjson

from billing.proof.result import Problem
from billing.store import invoices as rows
from billing.store import trail as store_trail
from billing.store.store import Connection

_PREFIX = "invoice."
_Name = tuple[str, str]  # action and number


def check_invoices(connection: Connection) -> Iterator[Problem]:
    """The first row that differs."""
    standing, decided = _standing(connection), _decided(connection)
    for name in sorted(standing.keys() | decided.keys()):
        if standing.get(name) != decided.get(name):
            what, number = name
            said = (
                "its row is missing" if name not in standing else "its row differs from the trail"
            )
            if name not in decided:
                said = "it has no decision in the admin trail"
            yield Problem(f"invoice {number} ({what})", 0, "issued", said)
            return
    yield from _gaps(connection)


def _gaps(connection: Connection) -> Iterator[Problem]:
    numbers: dict[str, list[int]] = {}
    for row in rows.invoice_rows(connection):
        numbers.setdefault(row["series"], []).append(row["seq"])
    for series, found in numbers.items():
        if sorted(found) != list(range(1, len(found) + 1)):
            yield Problem(f"invoices {series}", 0, "issued", "their numbers have a gap")


def _standing(connection: Connection) -> dict[_Name, str]:
    found: dict[_Name, str] = {}
    for row in rows.parties_rows(connection):
        found["parties", str(row["seq"])] = rows.row_digest(row)
    for row in rows.invoice_rows(connection):
        found["issue", row["number"]] = rows.row_digest(row)
    for row in rows.mark_rows(connection):
        found[row["state"], row["number"]] = rows.row_digest(row)
    return found


def _decided(connection: Connection) -> dict[_Name, str]:
    return {
        (row["action"].removeprefix(_PREFIX), row["subject"]): orjson.loads(row["after"])["digest"]
        for row in store_trail.trail_rows(connection)
        if row["action"].startswith(_PREFIX)
    }
