"""The ledger's costs as FOCUS 1.0 rows, in CSV, for FinOps tools. Pure, but for one read."""

import io
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from billing.gate.entries import Entry, Kind
from billing.gate.holds import rate_ref
from billing.money import format_units
from billing.prices.book import PriceBook
from billing.prices.rating import Line, charge_in
from billing.reports.csv import safe_writer
from billing.reports.export import entry_id
from billing.store import reports as store_reports
from billing.store.store import LedgerStore

SHORTFALL = "minimum"  # the amount up to a minimum, which has no price
UNITS_OF = {
    "storage_token_hours": "Token-Hours",
    "storage_token_minutes": "Token-Minutes",
    "request": "Requests",
}
FOCUS_COLUMNS = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart"),
    *("ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice"),
    *("EffectiveCost", "InvoiceIssuerName", "ListCost", "ListUnitPrice", "PricingCategory"),
    *("PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ResourceId"),
    *("ServiceCategory", "ServiceName", "SkuId", "SkuPriceId", "SubAccountId", "SubAccountName"),
    "Tags",
    *("x_RequestId", "x_EntryId", "x_KeyId", "x_Session", "x_User"),
)


def corrected_instants(store: LedgerStore, entries: Iterable[Entry]) -> dict[str, int]:
    """The times of the charges corrected by these entries, by correction."""
    corrections = [entry for entry in entries if entry.kind is Kind.CORRECTION]
    with store.reading() as connection:
        return {
            entry_id(entry): store_reports.instant_of(
                connection, entry.tenant, entry.details["corrects"]
            )
            for entry in corrections
        }


def focus_rows(
    entries: Iterable[Entry], book: PriceBook, corrected: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """FOCUS rows: one per line of a charge, one per correction, and one for what grants paid of
    either. Deposits are not costs.

    `ListCost` is the price of the tokens without a cache; the other costs are the price paid.
    `corrected` is the result of `corrected_instants` for these entries.
    """
    for entry in entries:
        base, is_earlier = _focus_base(entry), False
        if entry.kind is Kind.CHARGE:
            yield from (base | row for row in _focus_charge(entry, book))
        elif entry.kind is Kind.CORRECTION:
            charged = _billing_period(corrected[entry_id(entry)])
            is_earlier = charged != _billing_period(entry.moment_ns)
            category = "Usage" if is_earlier else "Adjustment"
            why = entry.details.get("reason", "")
            yield base | _focus_once(-entry.amount, category, why, is_earlier)
        else:
            continue
        granted = entry.amounts.get("granted", 0)
        if granted:
            yield base | _focus_once(granted, "Credit", "paid from granted credits", is_earlier)


def _focus_charge(entry: Entry, book: PriceBook) -> Iterator[dict[str, Any]]:
    """The columns of a charge's lines."""
    ref = rate_ref(entry.details)
    pinned = book.pinned(ref)
    price_id = f"{ref.card}/{ref.version}/{ref.model}/{ref.window}"
    for line in charge_in(entry.details, pinned).lines:
        if line.name == SHORTFALL:
            yield _focus_once(line.amount, "Adjustment", line.name)
            continue
        name = line.name
        uncached = pinned.rates.miss if name.startswith("hit_") else line.per_token
        if name == "explicit_hit":  # does not exist without a cache
            uncached = 0
        sku = f"{ref.model}:{line.name}"
        yield _focus_line(line, uncached, sku, price_id, pinned.rates.of(name))


def _focus_once(units: int, category: str, why: str, is_earlier: bool = False) -> dict[str, Any]:
    """The columns of an amount without a price; a `Correction` if of an earlier billing period."""
    costs = ("BilledCost", "EffectiveCost", "ContractedCost", "ListCost")
    return dict.fromkeys(costs, format_units(units)) | {
        "ChargeCategory": category,
        "ChargeClass": "Correction" if is_earlier else "",
        "ChargeFrequency": "One-Time",
        "ChargeDescription": why,
    }


def _billing_period(at_ns: int) -> tuple[datetime, datetime]:
    """The UTC month of an instant; the end is exclusive."""
    moment = datetime.fromtimestamp(at_ns // 10**9, UTC)
    start = moment.replace(day=1, hour=0, minute=0, second=0)
    return start, start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)


def _focus_base(entry: Entry) -> dict[str, Any]:
    start, end = _billing_period(entry.moment_ns)
    details = entry.details
    project, tags = details.get("project", ""), details.get("tags", {})
    return dict.fromkeys(FOCUS_COLUMNS, "") | {
        "BillingAccountId": entry.tenant,
        "BillingAccountName": entry.tenant,
        "BillingCurrency": entry.currency,
        "BillingPeriodStart": _iso(start),
        "BillingPeriodEnd": _iso(end),
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _time(entry.moment_ns),
        "ChargePeriodEnd": _time(entry.moment_ns + 10**9),
        "InvoiceIssuerName": "cachesvc",
        "ProviderName": "cachesvc",
        "PublisherName": "cachesvc",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Token inference",
        "SubAccountId": project,
        "SubAccountName": project,
        "x_RequestId": entry.request_id,
        "x_EntryId": entry_id(entry),
        "x_KeyId": details.get("key", ""),
        "x_Session": details.get("session", ""),
        "x_User": details.get("user", ""),
        "Tags": orjson.dumps(tags, option=orjson.OPT_SORT_KEYS).decode() if tags else "",
    }


def _focus_line(
    line: Line, uncached: int, sku: str, price_id: str, per_token: int
) -> dict[str, Any]:
    cost, unit_price = format_units(line.amount), format_units(line.per_token)
    # Hits of a prompt below the card's minimum have another price, with its own id.
    short = "" if line.per_token == per_token else ":below_minimum"
    unit = UNITS_OF.get(line.name, "Tokens")
    return {
        "BilledCost": cost,
        "EffectiveCost": cost,
        "ContractedCost": cost,
        "ContractedUnitPrice": unit_price,
        "ListCost": format_units(line.tokens * uncached),
        "ListUnitPrice": format_units(uncached),
        "ConsumedQuantity": line.tokens,
        "ConsumedUnit": unit,
        "PricingQuantity": line.tokens,
        "PricingCategory": "Standard",
        "PricingUnit": unit,
        "ChargeDescription": line.name,
        "SkuId": sku,
        "SkuPriceId": f"{price_id}:{line.name}{short}",
    }


def focus_csv(rows: Iterable[Mapping[str, Any]], *, header: bool = True) -> bytes:
    """FOCUS rows as CSV bytes; empty is null."""
    out = io.StringIO()
    write = safe_writer(out)
    if header:
        write(FOCUS_COLUMNS)
    for row in rows:
        write(row[name] for name in FOCUS_COLUMNS)
    return out.getvalue().encode()


def _time(at_ns: int) -> str:
    return _iso(datetime.fromtimestamp(at_ns // 10**9, UTC))


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
