"""Rows of idempotency keys. Called by `billing.idempotency`, each function in its caller's
transaction.
"""

from typing import Any

from sqlalchemy import Connection, delete, select, update
from sqlalchemy.engine import RowMapping

from billing.store.schema import holds, idempotency
from billing.store.store import LedgerStore


def insert(store: LedgerStore, connection: Connection, claim: dict[str, Any]) -> bool:
    """Inserts a claim. Returns False if the key exists already."""
    statement = store.insert(idempotency).values(claim)
    made = statement.on_conflict_do_nothing().returning(idempotency.c.key)
    return connection.execute(made).first() is not None


def find(connection: Connection, tenant: str, key: str) -> RowMapping | None:
    query = select(idempotency).where((idempotency.c.tenant == tenant) & (idempotency.c.key == key))
    return connection.execute(query).mappings().first()


def finish(
    connection: Connection, tenant: str, request_id: str, key: str, status: int, response: bytes
) -> None:
    connection.execute(
        update(idempotency)
        .where((idempotency.c.tenant == tenant) & (idempotency.c.key == key))
        .where(idempotency.c.request_id == request_id)
        .values(status=status, response=response)
    )


def remove(connection: Connection, tenant: str, key: str, request_id: str) -> bool:
    statement = delete(idempotency).where(
        (idempotency.c.tenant == tenant)
        & (idempotency.c.key == key)
        & (idempotency.c.request_id == request_id)
    )
    return connection.execute(statement).rowcount == 1


def purge(connection: Connection, now_ns: int) -> None:
    connection.execute(delete(idempotency).where(idempotency.c.expires_ns <= now_ns))


def is_held(connection: Connection, tenant: str, request_id: str) -> bool:
    query = select(holds.c.tenant).where(
        (holds.c.tenant == tenant) & (holds.c.request_id == request_id)
    )
    return connection.execute(query).first() is not None
