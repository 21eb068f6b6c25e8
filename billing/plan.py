"""Rates real history again: under a card that is not applied yet, or under the book as it stands.

Read-only. A plan keeps each request's usage and admission instant, and asks what it would have
cost.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from billing import store_reports
from billing.entries import Kind
from billing.holds import rate_ref
from billing.prices import PinnedRate, PriceBook, RateCard
from billing.rating import rate
from billing.store import LedgerStore
from billing.usage import Usage

Pricing = Callable[[str, int, str], PinnedRate]  # model, admission instant, currency


@dataclass(slots=True)
class Difference:
    """One tenant's model: what was charged and what would have been, in units."""

    tenant: str
    model: str
    currency: str
    requests: int = 0
    charged: int = 0
    planned: int = 0

    @property
    def change(self) -> int:
        return self.planned - self.charged


@dataclass(slots=True)
class Plan:
    """Differences by tenant and model, and the requests that were charged otherwise (the first
    few).
    """

    rows: list[Difference] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    num_differing: int = 0


SHOWN = 20


def under_card(card: RateCard) -> Pricing:
    """What requests would cost if this card had been in force. Raises `NoPrice`."""

    def price(model: str, instant_ns: int, currency: str) -> PinnedRate:
        return card.at(model, instant_ns)

    return price


def under_book(book: PriceBook) -> Pricing:
    """What the book as it stands says of each request's admission instant."""
    return book.at


def rerate(
    store: LedgerStore, pricing: Pricing, *, since_ns: int = 0, tenant: str | None = None
) -> Plan:
    """Rate every charge since an instant under `pricing`; changes nothing."""
    rows: dict[tuple[str, str], Difference] = {}
    plan = Plan()
    with store.reading() as connection:
        for entry in store_reports.stream_entries(connection, tenant, since_ns=since_ns):
            if entry.kind is not Kind.CHARGE:
                continue
            details = entry.details
            model = rate_ref(details).model
            admitted_ns = details.get("admitted_ns", entry.at_ns)
            usage = Usage.from_record(details.get("usage", {}))
            planned = rate(usage, pricing(model, admitted_ns, entry.currency)).amount
            row = rows.setdefault(
                (entry.tenant, model), Difference(entry.tenant, model, entry.currency)
            )
            row.requests += 1
            row.charged -= entry.amount
            row.planned += planned
            if planned != -entry.amount:
                plan.num_differing += 1
                if plan.num_differing <= SHOWN:
                    plan.differing.append(f"{entry.tenant}/{entry.request_id}")
    plan.rows = [rows[key] for key in sorted(rows)]
    return plan
