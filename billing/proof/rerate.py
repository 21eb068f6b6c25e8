"""Re-rates real history under a card not yet applied, or under the current book.

Read-only. A plan keeps each request's usage and admission and computes what it would have cost.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from billing.errors import NoPrice
from billing.gate.entries import Entry, Kind
from billing.gate.holds import rate_ref
from billing.gate.plans import binds_from_ns, charge_in, first_month, month_ns, month_of
from billing.prices.book import AND, PinnedRate, PriceBook, RateCard, Terms
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


@dataclass(frozen=True, slots=True)
class Minimum:
    """A card's monthly minimum for one tenant, and its last whole month under the card, in units.

    `binds_from` is the first month (UTC) that it binds.
    """

    tenant: str
    currency: str
    minimum: int
    binds_from: str
    month: str
    planned: int

    @property
    def missing(self) -> int:
        return max(0, self.minimum - self.planned)


@dataclass(slots=True)
class Plan:
    """Differences by tenant and model, and the first few requests with another price.

    `unpriced` are requests without a price under the plan. Charges in other currencies do not
    change.
    """

    rows: list[Difference] = field(default_factory=list)
    unpriced: list[Difference] = field(default_factory=list)
    minimums: list["Minimum"] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    num_differing: int = 0
    num_other_currency: int = 0


SHOWN = 20


def minimums(
    store: LedgerStore, card: RateCard, now_ns: int, tenant: str | None = None
) -> list[Minimum]:
    """What a card's minimum would add, by tenant. An unapplied card is applied now."""
    if not card.monthly_minimum:
        return []
    applied = card if card.applied_ns else replace(card, applied_ns=now_ns)
    month = month_of(month_ns(month_of(now_ns))[0] - 1)
    found = []
    with store.reading() as connection:
        accounts = store_reports.all_accounts(connection)
        for name in sorted(card.tenants & accounts.keys()):
            account = accounts[name]
            if account.currency != card.currency or tenant not in (None, name):
                continue
            charges = store_reports.charges_between(connection, name, *month_ns(month))
            planned = sum(_planned(each, under_card(card)) for each in charges if is_priced(each))
            binds_from = first_month(binds_from_ns(applied, account))
            of = (name, card.currency, card.monthly_minimum)
            found.append(Minimum(*of, binds_from, month, planned))
    return found


def _planned(entry: Entry, pricing: Pricing) -> int:
    """A charge under a plan. One without a price there stays as it is."""
    try:
        pinned = _price(entry, pricing)
    except NoPrice:
        pinned = None
    return -entry.amount if pinned is None else charge_in(entry.details, pinned).amount


def _price(entry: Entry, pricing: Pricing) -> PinnedRate | None:
    """A charge's price under a plan. Raises `NoPrice`."""
    admitted_ns = entry.details.get("admitted_ns", entry.moment_ns)
    model = rate_ref(entry.details).model
    return pricing(model, admitted_ns, entry.currency, terms_of(entry))


def under_card(card: RateCard) -> Pricing:
    """Prices requests as if this card had been in force; None in other currencies.

    Raises `NoPrice`.
    """

    def price(model: str, instant_ns: int, currency: str, terms: Terms) -> PinnedRate | None:
        if currency != card.currency or (card.tenants and terms.tenant not in card.tenants):
            return None
        return card.at(model, instant_ns, terms)

    return price


def under_book(book: PriceBook) -> Pricing:
    """Prices requests by the current book at their admission instant."""
    return book.at


def is_priced(entry: Entry) -> bool:
    """Whether it is a charge for tokens, not the minimum of a month."""
    return entry.kind is Kind.CHARGE and "commitment" not in entry.details


def terms_of(entry: Entry) -> Terms:
    """The terms of a charge. A service tier is included only if its card had it."""
    details = entry.details
    _, *factors = details["window"].split(AND)
    prompt = Usage.from_record(details.get("usage", {})).prompt
    return Terms(tenant=entry.tenant, prompt_tokens=prompt, service=factors[-1] if factors else "")


def rerate(
    store: LedgerStore, pricing: Pricing, *, since_ns: int = 0, tenant: str | None = None
) -> Plan:
    """Rates every charge since an instant under `pricing`. Changes nothing."""
    plan = Plan()
    rows: dict[tuple[str, str], Difference] = {}
    unpriced: dict[tuple[str, str], Difference] = {}
    with store.reading() as connection:
        for entry in store_reports.stream_entries(connection, tenant, since_ns=since_ns):
            if not is_priced(entry) or entry.moment_ns < since_ns:
                continue
            details = entry.details
            model = rate_ref(details).model
            planned = 0
            try:
                pinned = _price(entry, pricing)
                into = rows
            except NoPrice:
                into = unpriced
            else:
                if pinned is None:
                    plan.num_other_currency += 1
                    continue
                planned = charge_in(details, pinned).amount
            key = (entry.tenant, model)
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
