"""Grants and what is left of each, as documents; and parsing of a grant's last day."""

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

from billing.errors import InvalidSpan
from billing.gate.grants import grant_of, remaining
from billing.gate.work import NEVER
from billing.money import format_units
from billing.prices.book import NS
from billing.reports.documents import Document
from billing.reports.usage import LAST_DAY, midnight_ns

if TYPE_CHECKING:  # commands that call a server need no database
    from billing.store.store import LedgerStore


def grant_documents(store: "LedgerStore", tenant: str) -> list[Document]:
    """The unspent grants, in the order in which they are spent."""
    from billing.store import expiring as store_expiring
    from billing.store import reports as store_reports
    from billing.store.batch import find_corrections

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
