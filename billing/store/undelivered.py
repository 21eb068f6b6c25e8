"""Charges of answers that never arrived, as rows by fingerprint.

A retry that is delivered within a day pays instead of them (`billing.gate.gate`). Each function is
part of its caller's transaction.
"""

from sqlalchemy import ColumnElement, Connection, select

from billing.gate.commands import Key
from billing.gate.entries import Entry, Kind
from billing.gate.holds import StoredHold
from billing.prices.book import NS
from billing.store.dialects import insert_into
from billing.store.rows import read_entry, read_hold
from billing.store.schema import entries, holds, undelivered

KEPT_NS = 24 * 3600 * NS  # like an answer under its Idempotency-Key


def note(connection: Connection, fingerprint: Key, request_id: str, at_ns: int) -> None:
    """Records that this request's answer is lost. Idempotent. Removes expired rows."""
    tenant, text = fingerprint
    row = {"tenant": tenant, "fingerprint": text, "request_id": request_id, "at_ns": at_ns}
    connection.execute(
        insert_into(undelivered, connection.dialect.name).values(row).on_conflict_do_nothing()
    )
    connection.execute(undelivered.delete().where(undelivered.c.at_ns <= at_ns - KEPT_NS))


def forget(connection: Connection, fingerprint: Key) -> None:
    connection.execute(undelivered.delete().where(_lost(fingerprint)))


def charges(connection: Connection, fingerprint: Key, now_ns: int) -> list[Entry]:
    """The charges of answers with this fingerprint that were lost within a day."""
    recent = undelivered.c.at_ns > now_ns - KEPT_NS
    lost = select(undelivered.c.request_id).where(_lost(fingerprint) & recent)
    query = select(entries).where(
        (entries.c.tenant == fingerprint[0])
        & entries.c.request_id.in_(lost)
        & (entries.c.kind == Kind.CHARGE)
    )
    return [read_entry(row) for row in connection.execute(query).mappings()]


def running(connection: Connection, fingerprint: Key) -> list[StoredHold]:
    """The holds of requests with this fingerprint."""
    tenant, text = fingerprint
    same = holds.c.body.contains(f'"fingerprint":"{text}"', autoescape=True)
    query = select(holds).where((holds.c.tenant == tenant) & same)
    return [read_hold(row) for row in connection.execute(query).mappings()]


def _lost(fingerprint: Key) -> ColumnElement[bool]:
    return (undelivered.c.tenant == fingerprint[0]) & (undelivered.c.fingerprint == fingerprint[1])
