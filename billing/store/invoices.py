"""Rows of parties, invoices and their marks. Called by `billing.invoices` and the proof, in their
transactions. None of them is ever changed or removed.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson
from sqlalchemy import Connection, Select, func, select
from sqlalchemy.engine import RowMapping

from billing.store.schema import invoice_marks, invoices, parties

Row = dict[str, Any]


def row_digest(row: Mapping[Any, Any]) -> str:
    """The digest of a row in the admin trail, which proves the row."""
    values = [row[name] for name in sorted(row)]
    return hashlib.sha256(orjson.dumps(values)).hexdigest()


def add_parties(connection: Connection, text: str, at_ns: int) -> Row:
    """Adds a version of the parties and returns its row."""
    seq = (connection.scalar(select(func.max(parties.c.seq))) or 0) + 1
    row = {"seq": seq, "at_ns": at_ns, "text": text}
    connection.execute(parties.insert().values(row))
    return row


def parties_rows(connection: Connection) -> list[RowMapping]:
    """Every version, the one in force last."""
    return list(connection.execute(select(parties).order_by(parties.c.seq)).mappings())


def next_number(connection: Connection, series: str) -> int:
    """The number after the last of a series."""
    mine = invoices.c.series == series
    return (connection.scalar(select(func.max(invoices.c.seq)).where(mine)) or 0) + 1


def add_invoice(connection: Connection, values: Row) -> None:
    connection.execute(invoices.insert().values(values))


def add_mark(connection: Connection, number: str, state: str, at_ns: int) -> Row:
    """Adds a mark and returns its row."""
    row = {"number": number, "state": state, "at_ns": at_ns}
    connection.execute(invoice_marks.insert().values(row))
    return row


def find_invoice(connection: Connection, number: str) -> RowMapping | None:
    return connection.execute(_invoices().where(invoices.c.number == number)).mappings().first()


def invoice_rows(connection: Connection, tenant: str | None = None) -> list[RowMapping]:
    """Invoices and credit notes, newest first."""
    query = _invoices().order_by(invoices.c.at_ns.desc(), invoices.c.series, invoices.c.seq.desc())
    if tenant is not None:
        query = query.where(invoices.c.tenant == tenant)
    return list(connection.execute(query).mappings())


def mark_rows(connection: Connection) -> list[RowMapping]:
    return list(connection.execute(select(invoice_marks)).mappings())


def marks_of(connection: Connection, number: str) -> dict[str, int]:
    """The times of an invoice's marks, by state."""
    query = select(invoice_marks).where(invoice_marks.c.number == number)
    return {row.state: row.at_ns for row in connection.execute(query)}


def _invoices() -> Select[Any]:
    return select(invoices)
