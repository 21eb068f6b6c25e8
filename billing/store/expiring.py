"""Rows of grants that expire. Written with their entries, read by the sweeper and the proof."""

from collections.abc import Iterable

from sqlalchemy import Connection, delete, select

from billing.gate.entries import Entry, Kind
from billing.gate.grants import expires_ns_of
from billing.gate.work import NEVER
from billing.store.rows import read_entry
from billing.store.schema import entries, expiring

Row = tuple[str, int, str, int]  # tenant, number of the grant's entry, reference, expiry


def note_grants(connection: Connection, new: Iterable[Entry]) -> None:
    """Adds new expiring grants to the list and removes expired ones."""
    for entry in new:
        if entry.kind is Kind.GRANT and (expires_ns := expires_ns_of(entry)) != NEVER:
            row = (entry.tenant, entry.seq, entry.request_id, expires_ns)
            connection.execute(expiring.insert().values(row))
        elif entry.kind is Kind.EXPIRY:
            mine = expiring.c.tenant == entry.tenant
            seq = entry.details["corrects"]
            connection.execute(delete(expiring).where(mine & (expiring.c.seq == seq)))


def due_grants(connection: Connection, now_ns: int, limit: int) -> list[tuple[str, str]]:
    """Tenant and reference of expired grants, earliest first."""
    query = select(expiring.c.tenant, expiring.c.reference)
    query = query.where(expiring.c.expires_ns <= now_ns)
    query = query.order_by(expiring.c.expires_ns, expiring.c.tenant, expiring.c.seq).limit(limit)
    return [(row.tenant, row.reference) for row in connection.execute(query)]


def expiring_rows(connection: Connection) -> set[Row]:
    found = connection.execute(select(expiring))
    return {(row.tenant, row.seq, row.reference, row.expires_ns) for row in found}


def grants_of(connection: Connection, tenant: str) -> list[Entry]:
    """Every grant of a tenant, in order."""
    mine = (entries.c.tenant == tenant) & (entries.c.kind == Kind.GRANT.value)
    rare = entries.c.kind != Kind.CHARGE.value  # selects the index
    query = select(entries).where(mine & rare).order_by(entries.c.seq)
    return [read_entry(row) for row in connection.execute(query).mappings()]


def write_expiring(connection: Connection, rows: Iterable[Row]) -> None:
    """Replaces the list by the one that the proof derived from the entries."""
    connection.execute(delete(expiring))
    for row in sorted(rows):
        connection.execute(expiring.insert().values(row))
