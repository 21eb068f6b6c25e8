"""The register of invoices: issues them, marks them paid or void, and credits them.

Each change is one transaction with its row in the admin trail. A number is taken in the transaction
that issues its document, so the numbers of a series have no gap. Any thread; blocks.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum

import orjson

from billing.admin_trail import AdminTrail
from billing.errors import InvoiceError, MonthOpen, PartiesError, UnknownInvoice
from billing.gate.entries import Entry, Kind
from billing.gate.plans import GRACE_NS, REFERENCE, committing_card, month_ns
from billing.invoices.document import (
    CREDIT_NOTE,
    INVOICE,
    Document,
    Span,
    Standing,
    corrected_sums,
    credit_document,
    dated,
    invoice_document,
)
from billing.invoices.parties import Parties, parse_parties
from billing.money import format_units, parse_units, round_half_even
from billing.prices.book import NS, PriceBook
from billing.prices.cards import applied_card
from billing.reports.statement import month_days
from billing.store import accounts as store_accounts
from billing.store import invoices as rows
from billing.store import reports as store_reports
from billing.store.store import Connection, LedgerStore
from billing.store.trail import lock_trail


class InvoiceState(StrEnum):
    """A draft shows the month so far. In the other states the document is issued and never
    changes."""

    DRAFT = "draft"
    FINAL = "final"
    PAID = "paid"
    VOID = "void"


MARKS = (InvoiceState.PAID, InvoiceState.VOID)


@dataclass(frozen=True, slots=True)
class Invoice:
    """An invoice or a credit note, and its state."""

    document: Document
    state: InvoiceState

    @property
    def number(self) -> str:
        return str(self.document.get("number", ""))

    def as_json(self) -> Document:
        return self.document | {"state": self.state.value}


class InvoiceRegister:
    """Reads and changes of the invoices of one ledger."""

    def __init__(self, store: LedgerStore, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.store = store
        self._clock_ns = clock_ns
        self._trail = AdminTrail(store, clock_ns)

    # -- seller and buyers -------------------------------------------------------------------------

    def parties(self) -> Parties:
        """Raises `PartiesError` if none were applied."""
        with self.store.reading() as connection:
            return _parties(connection)

    def apply_parties(self, text: str, *, by: str, reason: str = "") -> Parties:
        """Sets seller and buyers for new invoices. Issued invoices keep their names."""
        parties = parse_parties(text)

        def write(connection: Connection) -> None:
            lock_trail(connection)
            standing = rows.invoice_rows(connection)
            zones = {orjson.loads(row["text"])["period"]["timezone"] for row in standing}
            if zones - {parties.seller.time_zone}:
                raise PartiesError(
                    f"[seller] time_zone was {zones.pop()} on invoices that stand; months that "
                    "begin elsewhere would bill hours twice or never"
                )
            unknown = parties.buyers.keys() - store_reports.all_accounts(connection).keys()
            if unknown:
                raise PartiesError(f"there is no tenant {sorted(unknown)[0]!r}; see [[buyer]]")
            row = rows.add_parties(connection, text, self._clock_ns())
            after = {"seller": parties.seller.name, "digest": rows.row_digest(row)}
            self._trail.add(connection, by, "invoice.parties", str(row["seq"]), None, after, reason)

        self.store.retrying(write)
        return parties

    # -- reading -----------------------------------------------------------------------------------

    def month(self, tenant: str, month: str) -> Invoice:
        """The issued invoice of a month, else a draft."""
        month = canonical_month(month)
        with self.store.reading() as connection:
            for found in _documents(connection, tenant):
                if found.state is not InvoiceState.VOID and _is_of(found.document, month):
                    return found
            parties = _parties(connection)
            standing = _standing(connection, tenant)
            draft = invoice_document(connection, parties, tenant, month, standing)
        return Invoice(draft, InvoiceState.DRAFT)

    def find(self, number: str, *, tenant: str | None = None) -> Invoice:
        """The invoice with this number. Raises `UnknownInvoice`, also for another tenant's."""
        with self.store.reading() as connection:
            return _find(connection, number, tenant)

    def listing(self, tenant: str | None = None) -> list[Invoice]:
        """Invoices and credit notes, the newest first."""
        with self.store.reading() as connection:
            return list(_documents(connection, tenant))

    # -- changes -----------------------------------------------------------------------------------

    def finalize(self, tenant: str, month: str, *, by: str, reason: str = "") -> Invoice:
        """Issues the invoice of a past month. If it was issued before, returns that one.

        Raises `MonthOpen` while the month's minimum is not booked.
        """
        month = canonical_month(month)

        def write(connection: Connection) -> Invoice:
            _lock(connection, tenant)
            for found in _documents(connection, tenant):
                if found.state is not InvoiceState.VOID and _is_of(found.document, month):
                    return found
            parties, now_ns = _parties(connection), self._clock_ns()
            buyer = parties.buyer(tenant)
            standing = _standing(connection, tenant)
            document = invoice_document(connection, parties, tenant, month, standing)
            if document["period"]["to_ns"] > now_ns:
                raise InvoiceError(f"{month} is not over; its invoice is a draft until then")
            _check_closed(connection, tenant, month)
            days = buyer.payment_days
            days = parties.seller.payment_days if days is None else days
            document = dated(document, now_ns, days, parties)
            series = parties.seller.series
            issued = self._issue(connection, document, series, month, now_ns, by, reason)
            if parse_units(document["due"]) <= 0:
                return self._mark(
                    connection, issued, InvoiceState.PAID, now_ns, by, "nothing is due"
                )
            return issued

        return self.store.retrying(write)

    def mark(self, number: str, state: InvoiceState, *, by: str, reason: str) -> Invoice:
        """Marks an issued invoice as paid, or as void if it is neither paid nor credited."""
        if state not in MARKS:
            raise InvoiceError(f"an invoice is marked paid or void, not {state}")

        def write(connection: Connection) -> Invoice:
            tenant = _find(connection, number).document["tenant"]
            _lock(connection, tenant)
            found = _find(connection, number)
            if found.state is state:
                return found
            is_settled = parse_units(found.document["due"]) <= 0  # there was nothing to pay
            if found.state is not InvoiceState.FINAL and not (
                found.state is InvoiceState.PAID and is_settled
            ):
                raise InvoiceError(f"{number} is {found.state}, and cannot become {state}")
            credited = any(
                each.document.get("credits") == number and each.state is not InvoiceState.VOID
                for each in _documents(connection, tenant)
            )
            if state is InvoiceState.VOID and credited:
                raise InvoiceError(f"{number} has a credit note; it can be paid, and not be void")
            return self._mark(connection, found, state, self._clock_ns(), by, reason)

        return self.store.retrying(write)

    def credit(self, number: str, *, by: str, reason: str) -> Invoice:
        """A credit note for the corrections made to an invoice's charges since it was issued.

        It covers corrections in no invoice or credit note yet, and books none itself.
        """

        def write(connection: Connection) -> Invoice:
            tenant = _find(connection, number).document["tenant"]
            _lock(connection, tenant)
            found = _find(connection, number)
            if found.document["kind"] != INVOICE or found.state is InvoiceState.VOID:
                raise InvoiceError(f"{number} is not an issued invoice")
            back = list(_uncredited(connection, found.document))
            net = round_half_even(-corrected_sums(back).net, found.document["places"])
            if net <= 0:
                raise InvoiceError(
                    f"everything given back of {number} is on an invoice or credit note already; "
                    "`cachesvc ledger correct` gives back a charge"
                )
            parties, now_ns = _parties(connection), self._clock_ns()
            document = dated(credit_document(found.document, back, net, reason), now_ns, 0, parties)
            series = parties.seller.credit_series
            return self._issue(connection, document, series, number, now_ns, by, reason)

        return self.store.retrying(write)

    def _issue(
        self,
        connection: Connection,
        document: Document,
        series: str,
        about: str,
        now_ns: int,
        by: str,
        reason: str,
    ) -> Invoice:
        seq = rows.next_number(connection, series)
        number = f"{series}{seq:06d}"
        document = {"number": number, **document}
        text = orjson.dumps(document, option=orjson.OPT_SORT_KEYS).decode()
        values = {"number": number, "series": series, "seq": seq, "tenant": document["tenant"]}
        values |= {"kind": document["kind"], "about": about, "at_ns": now_ns, "text": text}
        rows.add_invoice(connection, values)
        after = {"total": document["total"], "digest": rows.row_digest(values)}
        self._trail.add(connection, by, "invoice.issue", number, None, after, reason)
        return Invoice(document, InvoiceState.FINAL)

    def _mark(
        self,
        connection: Connection,
        invoice: Invoice,
        state: InvoiceState,
        now_ns: int,
        by: str,
        reason: str,
    ) -> Invoice:
        row = rows.add_mark(connection, invoice.number, state.value, now_ns)
        after = {"digest": rows.row_digest(row)}
        self._trail.add(connection, by, f"invoice.{state}", invoice.number, None, after, reason)
        return Invoice(invoice.document, state)


def _lock(connection: Connection, tenant: str) -> None:
    """Locks the register and the tenant, so that no invoice is issued and no charge booked
    meanwhile.

    Locks are taken in the ledger's order, to avoid a deadlock.
    """
    store_accounts.tenant_row(connection, tenant, lock=True)
    lock_trail(connection)


def _check_closed(connection: Connection, tenant: str, month: str) -> None:
    """Raises `MonthOpen` if a minimum binds in a month and is not booked yet."""
    account = store_reports.all_accounts(connection)[tenant]
    book = PriceBook(tuple(map(applied_card, store_accounts.card_rows(connection))))
    card = committing_card(book, account, month)
    if card and store_reports.find_request(connection, tenant, REFERENCE + month) is None:
        closes = datetime.fromtimestamp((month_ns(month)[1] + GRACE_NS) // NS, UTC)
        minimum = f"{format_units(card.monthly_minimum)} {card.currency}"
        raise MonthOpen(
            f"{tenant!r} has a minimum of {minimum} for {month}, which is booked once the month's "
            f"last requests are settled, at {closes:%Y-%m-%d %H:%M} UTC; issue the invoice then"
        )


def canonical_month(month: str) -> str:
    """A month in the form 2026-11, however it was written, because a month is invoiced once."""
    return month_days(month)[0].strftime("%Y-%m")


def _state(marks: Iterable[str]) -> InvoiceState:
    """The state of an invoice with these marks. Void is final."""
    return next(
        (state for state in (InvoiceState.VOID, InvoiceState.PAID) if state in marks),
        InvoiceState.FINAL,
    )


def _parties(connection: Connection) -> Parties:
    found = rows.parties_rows(connection)
    if not found:
        raise PartiesError(
            "invoices have no seller yet: write a file with a [seller] and a [[buyer]] for "
            "each tenant (docs/billing.md has one), and `cachesvc invoice parties FILE`"
        )
    return parse_parties(found[-1]["text"])


def _documents(connection: Connection, tenant: str | None = None) -> Iterable[Invoice]:
    marks: dict[str, set[str]] = {}
    for row in rows.mark_rows(connection):
        marks.setdefault(row["number"], set()).add(row["state"])
    for row in rows.invoice_rows(connection, tenant):
        yield Invoice(orjson.loads(row["text"]), _state(marks.get(row["number"], ())))


def _find(connection: Connection, number: str, tenant: str | None = None) -> Invoice:
    row = rows.find_invoice(connection, number)
    if row is None or tenant not in (None, row["tenant"]):
        named = f"no invoice has the number {number[:40]!r}"
        raise UnknownInvoice(f"{named}; see `cachesvc invoice show`")
    return Invoice(orjson.loads(row["text"]), _state(rows.marks_of(connection, number)))


def _is_of(document: Document, month: str) -> bool:
    return bool(document["kind"] == INVOICE and document["period"]["month"] == month)


def _standing(connection: Connection, tenant: str) -> Standing:
    """The totals so far, without void invoices and their credit notes."""
    found = [
        each.document for each in _documents(connection, tenant) if each.state != InvoiceState.VOID
    ]
    invoices = [document for document in found if document["kind"] == INVOICE]
    notes = [document for document in found if document["kind"] == CREDIT_NOTE]
    months = [_span(document) for document in invoices]

    def total(name: str) -> int:
        asked = sum(parse_units(document[name]) for document in invoices)
        return asked - sum(parse_units(document[name]) for document in notes)

    credited = {seq for document in notes for seq in document["corrections"]}
    credited_from_ns = min((document["period"]["from_ns"] for document in notes), default=0)
    return Standing(months, total("net"), total("owed"), credited, credited_from_ns)


def _span(document: Document) -> Span:
    period = document["period"]
    return date.fromisoformat(period["first"]), date.fromisoformat(period["last"])


def _uncredited(connection: Connection, invoiced: Document) -> Iterable[Entry]:
    """The corrections of an invoice's charges that are in no invoice or credit note."""
    tenant, period = invoiced["tenant"], invoiced["period"]
    found = [
        each.document for each in _documents(connection, tenant) if each.state != InvoiceState.VOID
    ]
    spans = [
        (document["period"]["from_ns"], document["period"]["to_ns"])
        for document in found
        if document["kind"] == INVOICE
    ]
    credited = {seq for document in found for seq in document.get("corrections", ())}
    for entry in store_reports.rare_entries(connection, tenant, period["from_ns"]):
        if entry.kind is not Kind.CORRECTION or entry.seq in credited:
            continue
        if any(from_ns <= entry.moment_ns < to_ns for from_ns, to_ns in spans):
            continue
        charged_ns = store_reports.instant_of(connection, tenant, entry.details["corrects"])
        if period["from_ns"] <= charged_ns < period["to_ns"]:
            yield entry
