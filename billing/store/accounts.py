"""Tenants, projects, keys and rate cards, as rows. Called by `billing.accounts`.

Every write takes the open transaction, so that it is atomic with its trail entry.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, delete, select, update
from sqlalchemy.engine import RowMapping
from sqlalchemy.exc import IntegrityError

from billing.gate.entries import ACCOUNTS, genesis
from billing.store.schema import accounts, keys, meta, projects, rate_cards, rate_limits
from billing.store.store import LedgerStore


def key_secret(store: LedgerStore) -> bytes:
    """The secret for key digests, created once and stored in the database."""
    with store.reading() as connection:
        found: bytes | None = connection.scalar(_meta("key_secret"))
    if found is not None:
        return found
    fresh = {"name": "key_secret", "value": secrets.token_bytes(32)}
    store.retrying(
        lambda connection: connection.execute(
            store.insert(meta).values(fresh).on_conflict_do_nothing()
        )
    )
    return key_secret(store)


def version(connection: Connection) -> int:
    """A number that grows with every change of tenants, keys or cards by any process."""
    found: bytes | None = connection.scalar(_meta("version"))
    return int(found) if found else 0


def bump_version(store: LedgerStore, connection: Connection) -> None:
    value = str(version(connection) + 1).encode()
    statement = store.insert(meta).values(name="version", value=value)
    connection.execute(
        statement.on_conflict_do_update(index_elements=["name"], set_={"value": value})
    )


def _meta(name: str) -> Any:
    return select(meta.c.value).where(meta.c.name == name)


def insert_tenant(
    connection: Connection, tenant: str, currency: str, credit_limit: int | None, now_ns: int
) -> bool:
    """Inserts a tenant. Returns False if it exists already."""
    values = {
        "tenant": tenant,
        "currency": currency,
        "credit_limit": credit_limit,
        "suspended": False,
        "created_ns": now_ns,
        "held": 0,
        "seq": 0,
        "at_ns": 0,
        "head": genesis(tenant),
        **dict.fromkeys(ACCOUNTS, 0),
    }
    return _inserted(connection, accounts.insert().values(values))


def _inserted(connection: Connection, statement: Any) -> bool:
    try:
        with connection.begin_nested():
            connection.execute(statement)
    except IntegrityError:
        return False
    return True


def tenant_rows(connection: Connection) -> list[RowMapping]:
    return list(connection.execute(select(accounts).order_by(accounts.c.tenant)).mappings())


def tenant_row(connection: Connection, tenant: str, *, lock: bool = False) -> RowMapping | None:
    query = select(accounts).where(accounts.c.tenant == tenant)
    if lock:
        query = query.with_for_update()
    return connection.execute(query).mappings().first()


def change_tenant(connection: Connection, tenant: str, **values: Any) -> None:
    connection.execute(update(accounts).where(accounts.c.tenant == tenant).values(values))


def rate_limits_of(connection: Connection, tenant: str | None = None) -> dict[str, dict[str, int]]:
    """The limits that admins set, by tenant and name."""
    query = select(rate_limits)
    if tenant is not None:
        query = query.where(rate_limits.c.tenant == tenant)
    found: dict[str, dict[str, int]] = {}
    for row in connection.execute(query):
        found.setdefault(row.tenant, {})[row.name] = row.value
    return found


def replace_rate_limits(connection: Connection, tenant: str, limits: Mapping[str, int]) -> None:
    connection.execute(delete(rate_limits).where(rate_limits.c.tenant == tenant))
    for name, value in limits.items():
        connection.execute(rate_limits.insert().values(tenant=tenant, name=name, value=value))


def insert_project(connection: Connection, tenant: str, project: str, now_ns: int) -> bool:
    values = {"tenant": tenant, "project": project, "created_ns": now_ns}
    return _inserted(connection, projects.insert().values(values))


def project_names(connection: Connection, tenant: str) -> list[str]:
    query = select(projects.c.project).where(projects.c.tenant == tenant)
    return sorted(connection.scalars(query))


def insert_key(connection: Connection, values: dict[str, Any]) -> None:
    connection.execute(keys.insert().values(values))


def key_rows(connection: Connection, tenant: str | None = None) -> list[RowMapping]:
    query = select(keys).order_by(keys.c.created_ns, keys.c.key_id)
    if tenant is not None:
        query = query.where(keys.c.tenant == tenant)
    return list(connection.execute(query).mappings())


def live_keys(connection: Connection) -> list[Row[Any]]:
    """Every key with its tenant's currency.

    Revoked and expired keys are included, so that users get the right error.
    """
    query = select(
        keys.c.digest,
        keys.c.tenant,
        keys.c.project,
        keys.c.key_id,
        keys.c.name,
        keys.c.scopes,
        keys.c.expires_ns,
        keys.c.revoked_ns,
        accounts.c.currency,
    ).join(accounts, accounts.c.tenant == keys.c.tenant)
    return list(connection.execute(query))


def revoke_key(connection: Connection, key_id: str, now_ns: int) -> None:
    connection.execute(update(keys).where(keys.c.key_id == key_id).values(revoked_ns=now_ns))


def insert_card(connection: Connection, values: dict[str, Any]) -> None:
    connection.execute(rate_cards.insert().values(values))


def card_rows(connection: Connection) -> list[RowMapping]:
    query = select(rate_cards).order_by(rate_cards.c.applied_ns, rate_cards.c.valid_from_ns)
    return list(connection.execute(query).mappings())
