"""What a tenant can spend: the state of its hard limits, and what is left of its grants."""

from datetime import UTC, datetime

from billing.gate.limits import NOTHING, SpendLimit
from billing.gate.periods import period_ns, period_of
from billing.money import format_units
from billing.prices.book import NS
from billing.reports.documents import Document
from billing.reports.grants import grant_documents
from billing.store import limits as store_limits
from billing.store.store import Connection, LedgerStore


def standing(store: LedgerStore, tenant: str, now_ns: int) -> Document:
    """The rest of a tenant's grants, and its hard limits."""
    with store.reading() as connection:
        limits = limit_documents(connection, tenant, now_ns)
    return {"grants": grant_documents(store, tenant), "spend_limits": limits}


def limit_documents(connection: Connection, tenant: str, now_ns: int) -> list[Document]:
    """A tenant's hard limits, by name, as it may see them."""
    return [
        {
            "name": limit.name,
            "of": limit.of,
            "value": limit.value,
            "per": limit.per,
            "amount": format_units(limit.amount),
            **limit_state(connection, limit, now_ns),
        }
        for limit in store_limits.limit_rows(connection, tenant)
    ]


def limit_state(connection: Connection, limit: SpendLimit, now_ns: int) -> Document:
    """What a limit counts now; a limit of each key or user, for the one that spent most."""
    period = period_of(limit.per, now_ns)
    found = store_limits.highest(connection, limit.name, period)
    who, spending = found or (None, NOTHING)
    left = limit.amount - spending.charged - spending.held
    ends = datetime.fromtimestamp(period_ns(period)[1] // NS, UTC)
    return {
        "spent": format_units(spending.charged),
        "held": format_units(spending.held),
        "left": format_units(max(0, left)),
        "highest": who.value if who else "",
        "ends_at": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
