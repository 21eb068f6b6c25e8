"""Rows of scoped grants: what is left of each."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, select

from billing.gate.scoped import ScopedGrant
from billing.gate.work import TenantAccount
from billing.store.schema import scoped_grants

BETWEEN = "\n"  # separator; names in a scope are one line

Row = dict[str, Any]


def scoped_rows(connection: Connection, tenants: Sequence[str] | None = None) -> list[Row]:
    """The rows of these tenants; of all tenants if none are named."""
    query = select(scoped_grants)
    if tenants is not None:
        query = query.where(scoped_grants.c.tenant.in_(tenants))
    return [dict(row) for row in connection.execute(query).mappings()]


def read_scoped(rows: Iterable[Row], accounts: Mapping[str, TenantAccount]) -> None:
    """Sets what is left of scoped grants in the accounts."""
    for row in rows:
        scope = tuple(row["scope"].split(BETWEEN))
        seq, left = row["seq"], int(row["remains"])
        grant = ScopedGrant(seq, row["reference"], scope, row["expires_ns"], left)
        accounts[row["tenant"]].grants[seq] = grant


def scoped_row(tenant: str, grant: ScopedGrant) -> Row:
    return {
        "tenant": tenant,
        "seq": grant.seq,
        "reference": grant.reference,
        "scope": BETWEEN.join(grant.scope),
        "expires_ns": grant.expires_ns,
        "remains": grant.left,
    }


def rewrite_scoped(connection: Connection, accounts: Iterable[TenantAccount]) -> None:
    """Replaces all rows by those that the proof derived from the entries."""
    connection.execute(delete(scoped_grants))
    made = [scoped_row(each.tenant, g) for each in accounts for g in each.grants.values()]
    if made:
        connection.execute(scoped_grants.insert(), made)
