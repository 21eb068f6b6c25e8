"""Revenue by token class and day, and by tenant. Read-only, from rollups.

A day's classes are its rolled-up tokens at their charged rates. Hits below a card's minimum cached
size were charged as misses and have a class of their own, so the classes always sum to the charges.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, timedelta

from billing.gate.rollups import Row
from billing.prices.book import PriceBook, RateRef
from billing.reports.usage import Period
from billing.store import reports as store_reports
from billing.store.store import LedgerStore
from billing.usage import CLASSES

FEES = "fees"  # of requests, plus additions up to their minimum
BELOW_MINIMUM = "below_minimum"  # hits of prompts too short for the hit price
REVENUE_CLASSES = (*CLASSES, FEES, BELOW_MINIMUM)
_EPOCH = date(1970, 1, 1)


@dataclass(slots=True)
class Revenue:
    """One day (UTC) in one currency; amounts in units. `sum(amounts) == charged`."""

    day: date
    currency: str
    amounts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REVENUE_CLASSES, 0))
    charged: int = 0
    saved: int = 0
    requests: int = 0

    def add(self, row: Row, book: PriceBook) -> None:
        ref = RateRef(row["card"], row["version"], row["model"], row["window_name"])
        rates = book.pinned(ref).rates
        self.amounts[FEES] += row["fees"]
        left = row["amount"] - row["fees"]
        for name in CLASSES:
            amount = row[name] * rates.of(name)
            self.amounts[name] += amount
            left -= amount
        self.amounts[BELOW_MINIMUM] += left
        self.charged += row["amount"]
        self.saved += row["saved"]
        self.requests += row["requests"]


def revenue(
    store: LedgerStore,
    book: PriceBook,
    first: date,
    last: date,
    takes: Callable[[Row], bool] = lambda row: True,
) -> tuple[list[Revenue], list[Period]]:
    """Revenue for each of these days and each currency, oldest first, including empty days; and
    each tenant's sums, the highest of each currency first. Both are of the rows that `takes`
    wants."""
    days = range((first - _EPOCH).days, (last - _EPOCH).days + 1)
    with store.reading() as connection:
        accounts = store_reports.all_accounts(connection)
        rows = store_reports.daily(connection, None, days.start, days.stop)
    rows = [row for row in rows if takes(row)]
    currencies = sorted({accounts[row["tenant"]].currency for row in rows})
    table = {
        (day, code): Revenue(_EPOCH + timedelta(days=day), code)
        for day in days
        for code in currencies
    }
    tenants: dict[str, Period] = {}
    for row in rows:
        tenant, currency = row["tenant"], accounts[row["tenant"]].currency
        table[row["day"], currency].add(row, book)
        tenants.setdefault(tenant, Period(tenant, "all", currency)).add(row)
    ranked = sorted(tenants.values(), key=lambda each: (each.currency, -each.amount, each.tenant))
    return list(table.values()), ranked
