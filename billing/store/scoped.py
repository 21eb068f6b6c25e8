"""Rows of grants for some prices only: what is left of each."""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, delete, select

from billing.gate.scoped import ScopedGrant
from billing.gate.work import TenantAccount
from billing.store.schema import scoped_grants

BETWEEN = "\n"  # names in a scope are of one line

Row = tuple[str, int, str, str, int, int]


def scoped_rows(connection: Connection, tenants: Sequence[str] | None = None) -> list[Row]:
    """Of all tenants where none are named."""
    query = select(scoped_grants).order_by(scoped_grants.c.tenant, scoped_grants.c.seq)
    if tenants is not None:
        query = query.where(scoped_grants.c.tenant.in_(tenants))
    return [tuple(row) for row in connection.execute(query)]


def read_scoped(connection: Connection, accounts: Iterable[TenantAccount]) -> None:
    """Fill in what is left of these tenants' scoped grants."""
    by_tenant = {account.tenant: account for account in accounts}
    for tenant, seq, reference, scope, expires_ns, left in scoped_rows(connection, [*by_tenant]):
        names = tuple(scope.split(BETWEEN))
        by_tenant[tenant].grants[seq] = ScopedGrant(seq, reference, names, expires_ns, left)


def rows_of(account: TenantAccount) -> list[Row]:
    return [
        (account.tenant, g.seq, g.reference, BETWEEN.join(g.scope), g.expires_ns, g.left)
        for _, g in sorted(account.grants.items())
    ]


def write_scoped(connection: Connection, account: TenantAccount) -> None:
    """Write what changed of a tenant's scoped grants."""
    names = [column.name for column in scoped_grants.c]
    found = {row[1]: row for row in scoped_rows(connection, [account.tenant])}
    for row in rows_of(account):
        if found.get(row[1]) != row:
            values: dict[str, Any] = dict(zip(names, row, strict=True))
            same = (scoped_grants.c.tenant == row[0]) & (scoped_grants.c.seq == row[1])
            connection.execute(delete(scoped_grants).where(same))
            connection.execute(scoped_grants.insert().values(values))


def rewrite_scoped(connection: Connection, accounts: Iterable[TenantAccount]) -> None:
    """Replace all rows by those that the proof derived from the entries."""
    connection.execute(delete(scoped_grants))
    for account in accounts:
        write_scoped(connection, account)
