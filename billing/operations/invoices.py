"""Invoices: drafts, issued invoices and their states, seller and buyers."""

from billing.errors import MonthOpen
from billing.invoices.register import InvoiceRegister, InvoiceState, canonical_month
from billing.invoices.render import Form, render, summary
from billing.operations.books import Books
from billing.reports.documents import Document


def list_invoices(books: Books, *, tenant: str | None = None) -> list[Document]:
    """Invoices and credit notes, the newest first."""
    books.accounts.expect(tenant)
    return [summary(each) for each in InvoiceRegister(books.store).listing(tenant)]


def show_invoice(books: Books, *, number: str, format: Form = Form.JSON) -> Document | bytes:  # noqa: A002  as the wire calls it
    """One invoice or credit note: a document, or the bytes of a file of that format."""
    found = InvoiceRegister(books.store).find(number)
    return found.as_json() if format is Form.JSON else render(found, format)


def show_month(
    books: Books,
    *,
    tenant: str,
    month: str,
    format: Form = Form.JSON,  # noqa: A002
) -> Document | bytes:
    """The invoice of a tenant's month such as 2026-11, else a draft of it."""
    found = InvoiceRegister(books.store).month(tenant, month)
    return found.as_json() if format is Form.JSON else render(found, format)


def finalize_invoice(books: Books, *, tenant: str, month: str, by: str, why: str) -> Document:
    """Issues the invoice of a past month. If it was issued before, returns that one.

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


def mark_invoice(books: Books, *, number: str, state: InvoiceState, by: str, why: str) -> Document:
    """Marks an invoice as paid or void. Books no money."""
    return InvoiceRegister(books.store).mark(number, state, by=by, reason=why).as_json()


def credit_invoice(books: Books, *, number: str, by: str, why: str) -> Document:
    """A credit note for the corrections made to an invoice's charges since it was issued."""
    return InvoiceRegister(books.store).credit(number, by=by, reason=why).as_json()


def show_parties(books: Books) -> Document:
    """Seller and buyers, as TOML."""
    return {"toml": InvoiceRegister(books.store).parties().text}


def apply_parties(books: Books, *, toml: str, by: str, why: str) -> Document:
    """Sets seller and buyers for new invoices. Issued invoices keep their names."""
    applied = InvoiceRegister(books.store).apply_parties(toml, by=by, reason=why)
    return {"seller": applied.seller.name, "buyers": sorted(applied.buyers)}
