"""Rows of tenants' wallets, in other currencies than their own."""

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, delete, select

from billing.store.schema import wallets

Key = tuple[str, str]  # tenant, currency


def wallet_rows(connection: Connection, tenants: Sequence[str] | None = None) -> dict[Key, int]:
    """The balance of each wallet; of all tenants if none are named."""
    query = select(wallets)
    if tenants is not None:
        query = query.where(wallets.c.tenant.in_(tenants))
    return {(row.tenant, row.currency): row.amount for row in connection.execute(query)}


def write_wallets(connection: Connection, changed: Mapping[Key, int]) -> None:
    for (tenant, currency), amount in sorted(changed.items()):
        same = (wallets.c.tenant == tenant) & (wallets.c.currency == currency)
        connection.execute(delete(wallets).where(same))
        row = {"tenant": tenant, "currency": currency, "amount": amount}
        connection.execute(wallets.insert().values(row))


def rewrite_wallets(connection: Connection, found: Mapping[Key, int]) -> None:
    """Replaces all rows by those that the proof derived from the entries."""
    connection.execute(delete(wallets))
    write_wallets(connection, found)
