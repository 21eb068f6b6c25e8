"""What a tenant can spend: the state of its hard limits, and what is left of its grants."""

from datetime import UTC, date, datetime, timedelta

from billing.errors import InvalidSpan
from billing.gate.grants import grant_of, remaining
from billing.gate.limits import NOTHING, SpendLimit, period_ns, period_of
from billing.gate.work import NEVER
from billing.money import format_units
from billing.prices.book import NS
from billing.reports.documents import Document
from billing.reports.usage import LAST_DAY, midnight_ns
from billing.store import expiring as store_expiring
from billing.store import limits as store_limits
from billing.store import reports as store_reports
from billing.store.batch import find_corrections
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
            **{name: getattr(limit, name) for name in ("name", "of", "value", "per")},
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


def grant_documents(store: LedgerStore, tenant: str) -> list[Document]:
    """The unspent grants, in the order in which they are spent."""
    with store.reading() as connection:
        account = store_reports.all_accounts(connection)[tenant]
        grants = [
            grant_of(entry, find_corrections(connection, entry))
            for entry in store_expiring.grants_of(connection, tenant)
        ]
    left = remaining(grants, account.balances["granted"])
    return [
        {
            "reference": grant.reference,
            "amount": format_units(grant.amount),
            "left": format_units(left[grant.seq]),
            "expires_ns": None if grant.expires_ns == NEVER else grant.expires_ns,
        }
        for grant in sorted(grants, key=lambda grant: grant.order)
        if left.get(grant.seq)
    ]


def end_of(text: str, now_ns: int) -> int:
    """The end (UTC) of a day such as 2027-01-31, or of a day relative to now such as 90d."""
    today = datetime.fromtimestamp(now_ns // NS, UTC).date()
    try:
        if text.endswith("d") and text[:-1].isdecimal():
            day = today + timedelta(days=min(int(text[:-1]), 10**5))
        else:
            day = date.fromisoformat(text)
    except ValueError:
        raise InvalidSpan(f"{text!r} is not a day; write it like 2027-01-31, or 90d") from None
    if not today <= day < LAST_DAY:
        raise InvalidSpan(f"{day} is not from today to {LAST_DAY}")
    return midnight_ns(day + timedelta(days=1), UTC)
