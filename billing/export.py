"""Charges for other systems: CloudEvents as JSON lines, and FOCUS 1.0 cost rows as CSV.

An export has a name and remembers how far it has come in each tenant's chain; the chains are the
outbox. It advances after its sink has taken a chunk, so a crash sends a chunk again and never skips
one: ids are stable (`tenant/number`), and the receiver drops what it has.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import orjson

from billing import store_reports
from billing.entries import Entry, Kind
from billing.holds import rate_ref
from billing.money import format_units
from billing.prices import PriceBook
from billing.rating import Line, rate
from billing.store import LedgerStore
from billing.usage import Usage

EVENT_TYPES = {
    Kind.CHARGE: "cachesvc.usage.charged.v1",
    Kind.CORRECTION: "cachesvc.usage.corrected.v1",
    Kind.GRANT: "cachesvc.balance.granted.v1",
    Kind.TOPUP: "cachesvc.balance.topped_up.v1",
}
CHUNK = 1_000

Sink = Callable[[list[Entry]], None]


def drain(store: LedgerStore, name: str, sink: Sink) -> int:
    """Hand every entry after this export's position to `sink`, in chunks; gives how many.

    `sink` returns when the chunk is safe; if it raises, the position stays before that chunk.
    """
    with store.reading() as connection:
        positions = store_reports.cursors(connection, name)
        accounts = store_reports.all_accounts(connection)
    sent = 0
    for tenant, account in accounts.items():
        position = positions.get(tenant, 0)
        while position < account.seq:
            chunk = _chunk(store, tenant, position)
            sink(chunk)
            position = chunk[-1].seq
            store_reports.advance(store, name, {tenant: position})
            sent += len(chunk)
    return sent


def _chunk(store: LedgerStore, tenant: str, after: int) -> list[Entry]:
    with store.reading() as connection:
        return list(islice(store_reports.stream_entries(connection, tenant, after=after), CHUNK))


def cloud_event(entry: Entry, source: str = "cachesvc") -> dict[str, Any]:
    """An entry as a CloudEvent 1.0 in structured JSON form."""
    details = entry.details
    return {
        "specversion": "1.0",
        "id": entry_id(entry),
        "source": source,
        "type": EVENT_TYPES[entry.kind],
        "time": _time(entry.at_ns),
        "subject": entry.tenant,
        "datacontenttype": "application/json",
        "data": {
            "tenant": entry.tenant,
            "request_id": entry.request_id,
            "currency": entry.currency,
            "amount": format_units(entry.amount),
            "hash": entry.hash.hex(),
            **details,
        },
    }


def entry_id(entry: Entry) -> str:
    """The same for ever: the tenant and the number in its chain."""
    return f"{entry.tenant}/{entry.seq}"


def cloud_event_lines(entries: Iterable[Entry], source: str = "cachesvc") -> bytes:
    """One JSON document a line."""
    return b"".join(orjson.dumps(cloud_event(entry, source)) + b"\n" for entry in entries)


FOCUS_COLUMNS = (
    *("BilledCost", "BillingAccountId", "BillingCurrency", "BillingPeriodEnd"),
    *("BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription"),
    *("ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity"),
    *("ConsumedUnit", "ContractedCost", "ContractedUnitPrice", "EffectiveCost"),
    *("InvoiceIssuerName", "ListCost", "ListUnitPrice", "PricingQuantity", "PricingUnit"),
    *("ProviderName", "PublisherName", "ResourceId", "ServiceCategory", "ServiceName"),
    *("SkuId", "SkuPriceId", "SubAccountId", "x_RequestId", "x_EntryId"),
)


def focus_rows(entries: Iterable[Entry], book: PriceBook) -> Iterator[dict[str, Any]]:
    """FOCUS rows: one for each line of a charge, one for each correction. Deposits are no cost.

    `ListCost` is what the tokens would have cost without a cache; the rest is the price paid.
    """
    for entry in entries:
        if entry.kind is Kind.CHARGE:
            ref = rate_ref(entry.details)
            pinned = book.pinned(ref)
            for line in rate(Usage.from_record(entry.details.get("usage", {})), pinned).lines:
                uncached = pinned.rates.miss if line.name.startswith("hit_") else line.per_token
                sku = f"{ref.model}:{line.name}"
                yield _focus_base(entry) | _focus_line(line, uncached, sku, "/".join(ref[:2]))
        elif entry.kind is Kind.CORRECTION:
            cost = format_units(-entry.amount)
            yield _focus_base(entry) | {
                "BilledCost": cost,
                "EffectiveCost": cost,
                "ContractedCost": cost,
                "ListCost": cost,
                "ChargeClass": "Correction",
                "ChargeDescription": entry.details.get("reason", ""),
            }


def _focus_base(entry: Entry) -> dict[str, Any]:
    moment = datetime.fromtimestamp(entry.at_ns // 10**9, UTC)
    start = moment.replace(day=1, hour=0, minute=0, second=0)
    end = start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)
    return dict.fromkeys(FOCUS_COLUMNS, "") | {
        "BillingAccountId": entry.tenant,
        "BillingCurrency": entry.currency,
        "BillingPeriodStart": _iso(start),
        "BillingPeriodEnd": _iso(end),
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _time(entry.at_ns),
        "ChargePeriodEnd": _time(entry.at_ns + 10**9),
        "InvoiceIssuerName": "cachesvc",
        "ProviderName": "cachesvc",
        "PublisherName": "cachesvc",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Token inference",
        "SubAccountId": entry.details.get("project", ""),
        "x_RequestId": entry.request_id,
        "x_EntryId": entry_id(entry),
    }


def _focus_line(line: Line, uncached: int, sku: str, price_id: str) -> dict[str, Any]:
    cost, unit_price = format_units(line.amount), format_units(line.per_token)
    return {
        "BilledCost": cost,
        "EffectiveCost": cost,
        "ContractedCost": cost,
        "ContractedUnitPrice": unit_price,
        "ListCost": format_units(line.tokens * uncached),
        "ListUnitPrice": format_units(uncached),
        "ConsumedQuantity": line.tokens,
        "ConsumedUnit": "Tokens",
        "PricingQuantity": line.tokens,
        "PricingUnit": "Tokens",
        "ChargeDescription": line.name,
        "SkuId": sku,
        "SkuPriceId": f"{price_id}:{line.name}",
    }


def focus_csv(entries: Iterable[Entry], book: PriceBook, *, header: bool = True) -> bytes:
    """FOCUS rows as CSV bytes."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FOCUS_COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(focus_rows(entries, book))
    return out.getvalue().encode()


def _time(at_ns: int) -> str:
    return _iso(datetime.fromtimestamp(at_ns // 10**9, UTC))


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
