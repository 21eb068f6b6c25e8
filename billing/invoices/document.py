"""The content of an invoice, as a JSON document that is stored as issued. Pure except for reads.

Amounts are exact to the ledger. The amount due is rounded half-even to the currency's places
(`money.minor_places`), and the rounding difference is carried to the tenant's next invoice:

    net = round(everything in the months invoiced so far and this one, and what credit notes told of
                in other months - net of the standing invoices + net of their credit notes)

So the nets of a tenant's invoices plus the carried amount always equal its ledger, even if a charge
of an earlier month comes late or an invoice is void and issued again.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from billing.errors import UnknownTenant
from billing.gate.entries import GRANTED, Entry, Kind
from billing.invoices.parties import Buyer, Parties, Tax
from billing.money import format_units, minor_places, parse_units, round_half_even
from billing.prices.book import NS
from billing.reports.statement import StatementLine, month_days, statement_of
from billing.reports.usage import Query, Unit, charged
from billing.store import reports as store_reports
from billing.store.store import Connection

Document = dict[str, Any]
Span = tuple[date, date]  # first and last day
INVOICE, CREDIT_NOTE = "invoice", "credit_note"
TENTHS = 10**4  # of a percent, the precision of a rate


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of charges minus corrections: total, paid by grants, and owed."""

    exact: int = 0
    granted: int = 0
    owed: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.exact + other.exact, self.granted + other.granted, self.owed + other.owed)

    @property
    def net(self) -> int:
        """The net amount; granted money is a discount."""
        return self.exact - self.granted


@dataclass(frozen=True, slots=True)
class Standing:
    """The totals of the tenant's valid invoices and their credit notes so far."""

    months: Sequence[Span]
    net: int
    owed: int
    credited: Collection[int] = ()  # numbers of the corrections in credit notes
    credited_from_ns: int = 0  # the earliest possible time of those


def invoice_document(
    connection: Connection, parties: Parties, tenant: str, month: str, standing: Standing
) -> Document:
    """The invoice of a month, without number and date."""
    account = store_reports.all_accounts(connection).get(tenant)
    if account is None:
        raise UnknownTenant(f"tenant {tenant!r} does not exist; see `cachesvc tenants show`")
    span, zone = month_days(month), parties.seller.zone
    places = minor_places(account.currency)
    shown = statement_of(connection, account, span, zone)
    own = month_sums(connection, tenant, [span], parties)
    others = month_sums(connection, tenant, standing.months, parties)
    others += _credited_elsewhere(connection, tenant, [span, *standing.months], parties, standing)
    asked = own.net + others.net - standing.net
    net = round_half_even(asked, places)
    owed = round_half_even(own.owed + others.owed - standing.owed, places)
    buyer = parties.buyers.get(tenant) or Buyer(tenant=tenant, name=tenant, address=())
    rows = [
        ("corrections", "Corrections of charges", -shown.corrected),
        ("credits", "Paid from granted credits", -own.granted),
        ("brought_forward", "Brought forward from earlier invoices", asked - own.net),
    ]
    from_ns, to_ns = Query(since=span[0], until=span[1], zone=zone).bounds_ns()
    return {
        "kind": INVOICE,
        "tenant": tenant,
        "currency": account.currency,
        "places": places,
        "period": {
            "month": shown.month,
            "first": span[0].isoformat(),
            "last": span[1].isoformat(),
            "timezone": shown.zone,
            "from_ns": from_ns,
            "to_ns": to_ns,
        },
        **_names(parties, buyer),
        "requests": shown.requests,
        "lines": [_line(line, places) for line in shown.lines],
        "adjustments": _adjustments(rows, shown.rounded, asked - net, net, places),
        "carried": format_units(asked - net),
        **_totals(net, owed, parties.taxes_of(buyer), places),
        "entries": account.seq,
    }


def credit_document(invoiced: Document, back: Sequence[Entry], net: int, reason: str) -> Document:
    """A credit note for `net` of an invoice: the rounded refunds of these corrections."""
    places, sums = invoiced["places"], corrected_sums(back)
    owed = min(net, max(0, round_half_even(-sums.owed, places)))
    taxes = [Tax(tax["name"], tax["rate"]) for tax in invoiced["taxes"]]
    kept = ("tenant", "currency", "places", "period", "seller", "buyer")
    label = f"Credit for invoice {invoiced['number']}: {reason}"
    return {
        "kind": CREDIT_NOTE,
        **{name: invoiced[name] for name in kept},
        "credits": invoiced["number"],
        "reason": reason,
        "corrections": [entry.seq for entry in back],
        "lines": [],
        "adjustments": _adjustments(
            [("credit", label, -sums.net)], 0, -sums.net - net, net, places
        ),
        **_totals(net, owed, taxes, places),
    }


def month_sums(
    connection: Connection, tenant: str, months: Iterable[Span], parties: Parties
) -> Sums:
    """The sums over these months.

    Consecutive months are read as one span, because in a zone other than UTC the days at a span's
    ends must be read from their charges.
    """
    total = Sums()
    for first, last in _joined(months):
        query = Query(tenant=tenant, since=first, until=last, zone=parties.seller.zone)
        for _, row in charged(connection, query, Unit.ALL):
            total += Sums(row["amount"], row["granted"], row["owed"])
        rare = store_reports.rare_entries(connection, tenant, *query.bounds_ns())
        total += corrected_sums(entry for entry in rare if entry.kind is Kind.CORRECTION)
    return total


def _credited_elsewhere(
    connection: Connection,
    tenant: str,
    months: Iterable[Span],
    parties: Parties,
    standing: Standing,
) -> Sums:
    """Corrections in credit notes that are in none of these months, but in one to be invoiced
    later."""
    if not standing.credited:
        return Sums()
    zone = parties.seller.zone
    spans = [Query(since=first, until=last, zone=zone).bounds_ns() for first, last in months]
    rare = store_reports.rare_entries(connection, tenant, standing.credited_from_ns)
    return corrected_sums(
        entry
        for entry in rare
        if entry.seq in standing.credited
        and not any(from_ns <= entry.moment_ns < to_ns for from_ns, to_ns in spans)
    )


def corrected_sums(corrections: Iterable[Entry]) -> Sums:
    """The corrections' share of the sums; negative for refunds."""
    total = Sums()
    for entry in corrections:
        moved = entry.amounts
        granted = sum(moved.get(name, 0) for name in GRANTED)
        total += Sums(-entry.amount, -granted, -moved.get("receivable", 0))
    return total


def _joined(months: Iterable[Span]) -> list[Span]:
    spans: list[Span] = []
    for first, last in sorted(months):
        if spans and spans[-1][1] + timedelta(days=1) == first:
            spans[-1] = spans[-1][0], last
        else:
            spans.append((first, last))
    return spans


def _names(parties: Parties, buyer: Buyer) -> Document:
    seller = parties.seller
    return {
        "seller": {
            "name": seller.name,
            "address": list(seller.address),
            "tax_id": seller.tax_id,
            "email": seller.email,
            "payment": seller.payment,
            "note": seller.note,
        },
        "buyer": {
            "name": buyer.name,
            "address": list(buyer.address),
            "tax_id": buyer.tax_id,
            "reference": buyer.reference,
            "note": buyer.note,
        },
    }


def _line(line: StatementLine, places: int) -> Document:
    return {
        "model": line.model,
        "rate_card": f"{line.card} {line.version}",
        "window": line.window,
        "class": line.name,
        "label": line.label,
        "quantity": line.tokens,
        "per_million": line.rate,
        "exact": format_units(line.amount),
        "amount": format_units(line.rounded, places),
    }


def _adjustments(
    rows: Iterable[tuple[str, str, int]], lines: int, carried: int, net: int, places: int
) -> list[Document]:
    """The rows between the lines and the net.

    `exact` sums exactly with the amount carried to the next invoice, `amount` with the rounding
    differences of the rows.
    """
    shown = [(*row, round_half_even(row[2], places)) for row in rows if row[2]]
    left = net - lines - sum(amount for *_, amount in shown)
    if carried or left:
        shown.append(("rounding", "Rounding; the rest is on the next invoice", -carried, left))
    return [
        {
            "name": name,
            "label": label,
            "exact": format_units(exact),
            "amount": format_units(amount, places),
        }
        for name, label, exact, amount in shown
    ]


def _totals(net: int, owed: int, taxes: Iterable[Tax], places: int) -> Document:
    """The totals. `paid_in_advance` is the part that the charges took from paid money."""
    lines = [
        {
            "name": tax.name,
            "rate": tax.rate,
            "base": format_units(net, places),
            "amount": format_units(tax_on(net, tax, places), places),
        }
        for tax in taxes
    ]
    of_taxes = sum(parse_units(line["amount"]) for line in lines)
    return {
        "net": format_units(net, places),
        "taxes": lines,
        "total": format_units(net + of_taxes, places),
        "paid_in_advance": format_units(net - owed, places),
        "due": format_units(owed + of_taxes, places),
        "owed": format_units(owed, places),
    }


def tax_on(net: int, tax: Tax, places: int) -> int:
    """The rounded tax on an amount with at most `places` decimals.

    It is exact before rounding, because a rate has at most four places.
    """
    exact, rest = divmod(net * int(tax.percent * TENTHS), TENTHS * 100)
    assert not rest, (net, tax)
    return round_half_even(exact, places)


def dated(document: Document, at_ns: int, days: int, parties: Parties) -> Document:
    """The document with the dates of its issue, in the seller's zone."""
    issued = datetime.fromtimestamp(at_ns // NS, parties.seller.zone).date()
    due = issued + timedelta(days=days)
    return document | {"issued_on": issued.isoformat(), "due_on": due.isoformat()}
