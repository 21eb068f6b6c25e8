"""/admin/api/invoices and parties: the operations of `billing.operations.invoices`."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from api.admin.access import Books, MayChange
from api.admin.routes.account import OfTenant
from api.admin.routes.bodies import AdminBody, InvoiceMark, NewInvoice, NewParties
from api.routes.invoices import Number
from api.shapes.invoice import invoice_answer
from billing.invoices.register import InvoiceState
from billing.invoices.render import Form
from billing.operations import invoices
from billing.reports.documents import Document

router = APIRouter(prefix="/admin/api", tags=["admin: invoices"])

AsForm = Annotated[Form, Query(alias="format")]


@router.get("/invoices")
def list_invoices(books: Books, tenant: OfTenant = None) -> list[Document]:
    """Invoices and credit notes, the newest first."""
    return invoices.list_invoices(books, tenant=tenant)


@router.post("/invoices", status_code=201)
def finalize_invoice(by: MayChange, books: Books, body: NewInvoice) -> Document:
    """Issue the invoice of a month that is over; again, it gives the one that stands."""
    return invoices.finalize_invoice(books, **body.model_dump(), by=by.name)


@router.get("/parties")
def show_parties(books: Books) -> Document:
    """Whom invoices are from and to, as TOML."""
    return invoices.show_parties(books)


@router.post("/parties")
def apply_parties(by: MayChange, books: Books, body: NewParties) -> Document:
    """Put seller and buyers in force; what was issued keeps the names that it has."""
    return invoices.apply_parties(books, **body.model_dump(), by=by.name)


@router.get("/invoices/of/{tenant}/{month}", response_model=None)
def show_month(books: Books, tenant: str, month: str, form: AsForm = Form.JSON) -> Response:
    """A tenant's month: the invoice that was issued, else a draft of it."""
    made = invoices.show_month(books, tenant=tenant, month=month, format=form)
    return invoice_answer(made, form, f"invoice-{month}")


@router.get("/invoices/{number}", response_model=None)
def show_invoice(books: Books, number: Number, form: AsForm = Form.JSON) -> Response:
    """One invoice or credit note, as JSON, CSV, a page to print, or PDF."""
    made = invoices.show_invoice(books, number=number, format=form)
    return invoice_answer(made, form, number)


@router.post("/invoices/{number}/mark")
def mark_invoice(by: MayChange, books: Books, number: Number, body: InvoiceMark) -> Document:
    """Say that an invoice was paid, or that it was wrong and is void. Books no money."""
    state = InvoiceState(body.state)
    return invoices.mark_invoice(books, number=number, state=state, by=by.name, why=body.why)


@router.post("/invoices/{number}/credit", status_code=201)
def credit_invoice(by: MayChange, books: Books, number: Number, body: AdminBody) -> Document:
    """A credit note over what corrections gave back of an invoice's charges since."""
    return invoices.credit_invoice(books, number=number, by=by.name, why=body.why)
