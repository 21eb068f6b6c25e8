"""Rows of spent included tokens, and the sums of a month's charges."""

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection, delete, func, select

from billing.gate.plans import month_ns
from billing.gate.rollups import DAY_NS, SPLIT
from billing.gate.work import Used
from billing.store.schema import included_used, usage_daily


def used_by(connection: Connection, tenants: Sequence[str] | None = None) -> dict[Used, int]:
    """Tokens by tenant, month, card and item; of all tenants if none are named."""
    query = select(included_used)
    if tenants is not None:
        query = query.where(included_used.c.tenant.in_(tenants))
    return {(r.tenant, r.month, r.card, r.item): r.tokens for r in connection.execute(query)}


def write_used(connection: Connection, changed: Mapping[Used, int]) -> None:
    for key, tokens in sorted(changed.items()):
        row = dict(zip(("tenant", "month", "card", "item"), key, strict=True))
        same = [included_used.c[name] == value for name, value in row.items()]
        connection.execute(delete(included_used).where(*same))
        connection.execute(included_used.insert().values(row | {"tokens": tokens}))


def rewrite_used(connection: Connection, used: Mapping[Used, int]) -> None:
    """Replaces all rows by those that the proof derived from the entries."""
    connection.execute(delete(included_used))
    write_used(connection, used)


def spent_in(
    connection: Connection, months: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], int]:
    """The sum of the charges of each (tenant, month)."""
    found = {}
    for tenant, month in months:
        first, after = (at_ns // DAY_NS for at_ns in month_ns(month))
        parts = [func.sum(usage_daily.c[f"amount_{part}"]) for part in ("hi", "lo")]
        query = select(*parts).where(usage_daily.c.tenant == tenant)
        query = query.where(usage_daily.c.day >= first, usage_daily.c.day < after)
        sums = connection.execute(query).one()
        found[tenant, month] = int(sums[0] or 0) * SPLIT + int(sums[1] or 0)
    return found
