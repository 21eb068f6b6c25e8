"""Invoices: drafts, issued invoices and their states, seller and buyers."""

from typing import Annotated, Literal

from billing.errors import MonthOpen
from billing.invoices.register import InvoiceRegister, InvoiceState, canonical_month
from billing.invoices.render import Form, render, summary
from billing.operations.arguments import InvoiceNumber, Name, OfTenant, Why, text
from billing.operations.books import Books
from billing.reports.documents import Document

Mark = Literal["paid", "void"]  # the states that a person sets


def list_invoices(books: Books, *, tenant: OfTenant = None) -> list[Document]:
    """Invoices and credit notes, the newest first."""
    books.accounts.expect(tenant)
    return [summary(each) for each in InvoiceRegister(books.store).listing(tenant)]


def show_invoice(
    books: Books,
    *,
    number: InvoiceNumber,
    format: Form = Form.JSON,  # noqa: A002  as the wire calls it
) -> Document | bytes:
    """One invoice or credit note, as JSON, CSV, a printable page or PDF."""
    found = InvoiceRegister(books.store).find(number)
    return found.as_json() if format is Form.JSON else render(found, format)


def show_month(
    books: Books,
    *,
    tenant: str,
    month: str,
    format: Form = Form.JSON,  # noqa: A002
) -> Document | bytes:
    """A tenant's month: the issued invoice, else a draft."""
    found = InvoiceRegister(books.store).month(tenant, month)
    return found.as_json() if format is Form.JSON else render(found, format)


def finalize_invoice(
    books: Books,
    *,
    tenant: Name,
    month: Annotated[str, text(7, "Such as 2026-11")],
    by: str,
    why: Why,
) -> Document:
    """Issue the invoice of a past month. If it was issued before, returns that one.

    Books the month's minimum first, if the server has not done it.
    """
    books.accounts.tenant(tenant)
    register = InvoiceRegister(books.store)
    try:
        issued = register.finalize(tenant, month, by=by, reason=why)
    except MonthOpen:
        books.ledger.close_month(tenant, canonical_month(month)).result()
        issued = register.finalize(tenant, month, by=by, reason=why)
    return issued.as_json()


def mark_invoice(
    books: Books, *, number: InvoiceNumber, state: Mark, by: str, why: Why
) -> Document:
    """Mark an invoice as paid or void. Books no money."""
    return (
        InvoiceRegister(books.store).mark(number, InvoiceState(state), by=by, reason=why).as_json()
    )


def credit_invoice(books: Books, *, number: InvoiceNumber, by: str, why: Why) -> Document:
    """A credit note for the corrections made to an invoice's charges since it was issued."""
    return InvoiceRegister(books.store).credit(number, by=by, reason=why).as_json()


def show_parties(books: Books) -> Document:
    """The seller and buyers named on invoices, as TOML."""
    return {"toml": InvoiceRegister(books.store).parties().text}


def apply_parties(
    books: Books,
    *,
    toml: Annotated[str, text(1 << 20, "[seller] and a [[buyer]] each")],
    by: str,
    why: Why,
) -> Document:
    """Set seller and buyers for new invoices; issued invoices keep their names."""
    applied = InvoiceRegister(books.store).apply_parties(toml, by=by, reason=why)
    return {"seller": applied.seller.name, "buyers": sorted(applied.buyers)}
