"""Re-rates real history under a card not yet applied, or under the current book.

Read-only. A plan keeps each request's usage and admission and computes what it would have cost.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from billing.errors import NoPrice
from billing.gate.entries import Kind
from billing.gate.holds import rate_ref
from billing.prices.book import PinnedRate, RateCard, RateRef, Terms
from billing.prices.rating import charge_in
from billing.store import reports as store_reports
from billing.store.store import LedgerStore
from billing.usage import Usage

# model, admission instant, currency, and what else the price depends on
Pricing = Callable[[str, int, str, Terms], PinnedRate | None]


@dataclass(slots=True)
class Difference:
    """Per tenant and model: the amounts charged and under the plan, in units."""

    tenant: str
    model: str
    currency: str
    charges: int = 0  # requests, and started hours of pins
    charged: int = 0
    planned: int = 0

    @property
    def change(self) -> int:
        return self.planned - self.charged


@dataclass(slots=True)
class Plan:
    """Differences by tenant and model, and the first few requests with another price.

    `unpriced` are requests without a price under the plan. Charges in other currencies do not
    change.
    """

    rows: list[Difference] = field(default_factory=list)
    unpriced: list[Difference] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    num_differing: int = 0
    num_other_currency: int = 0


SHOWN = 20


def under_card(card: RateCard) -> Pricing:
    """Prices requests as if this card had been in force; None in other currencies.

    Raises `NoPrice`.
    """

    def price(model: str, instant_ns: int, currency: str, terms: Terms) -> PinnedRate | None:
        if currency != card.currency or (card.tenants and terms.tenant not in card.tenants):
            return None
        return card.at(model, instant_ns, terms)

    return price


def _terms(tenant: str, ref: RateRef, details: dict[str, Any]) -> Terms:
    """The terms of a charge. A service tier is included only if its card had it."""
    _, *factors = ref.terms
    prompt = Usage.from_record(details.get("usage", {})).prompt
    return Terms(tenant=tenant, prompt_tokens=prompt, service=factors[-1] if factors else "")


def rerate(
    store: LedgerStore, pricing: Pricing, *, since_ns: int = 0, tenant: str | None = None
) -> Plan:
    """Rates every charge since an instant under `pricing`, for example a book's `at`. Read-only."""
    plan = Plan()
    rows: dict[tuple[str, str], Difference] = {}
    unpriced: dict[tuple[str, str], Difference] = {}
    with store.reading() as connection:
        for entry in store_reports.stream_entries(connection, tenant, since_ns=since_ns):
            if entry.kind is not Kind.CHARGE or entry.moment_ns < since_ns:
                continue
            details = entry.details
            ref, admitted_ns = rate_ref(details), details.get("admitted_ns", entry.moment_ns)
            terms = _terms(entry.tenant, ref, details)
            planned = 0
            try:
                pinned = pricing(ref.model, admitted_ns, entry.currency, terms)
                into = rows
            except NoPrice:
                into = unpriced
            else:
                if pinned is None:
                    plan.num_other_currency += 1
                    continue
                planned = charge_in(details, pinned).amount
            key = (entry.tenant, ref.model)
            row = into.setdefault(key, Difference(*key, entry.currency))
            row.charges += 1
            row.charged -= entry.amount
            row.planned += planned
            if into is rows and planned != -entry.amount:
                plan.num_differing += 1
                if plan.num_differing <= SHOWN:
                    plan.differing.append(f"{entry.tenant}/{entry.request_id}")
    plan.rows = [rows[key] for key in sorted(rows)]
    plan.unpriced = [unpriced[key] for key in sorted(unpriced)]
    return plan
