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
    """Issue the invoice of a past month. If it was issued before, returns that one."""
    return invoices.finalize_invoice(books, **body.model_dump(), by=by.name)


@router.get("/parties")
def show_parties(books: Books) -> Document:
    """The seller and buyers named on invoices, as TOML."""
    return invoices.show_parties(books)


@router.post("/parties")
def apply_parties(by: MayChange, books: Books, body: NewParties) -> Document:
    """Set seller and buyers for new invoices; issued invoices keep their names."""
    return invoices.apply_parties(books, **body.model_dump(), by=by.name)


@router.get("/invoices/of/{tenant}/{month}", response_model=None)
def show_month(books: Books, tenant: str, month: str, form: AsForm = Form.JSON) -> Response:
    """A tenant's month: the issued invoice, else a draft."""
    made = invoices.show_month(books, tenant=tenant, month=month, format=form)
    return invoice_answer(made, form, f"invoice-{month}")


@router.get("/invoices/{number}", response_model=None)
def show_invoice(books: Books, number: Number, form: AsForm = Form.JSON) -> Response:
    """One invoice or credit note, as JSON, CSV, a printable page or PDF."""
    made = invoices.show_invoice(books, number=number, format=form)
    return invoice_answer(made, form, number)


@router.post("/invoices/{number}/mark")
def mark_invoice(by: MayChange, books: Books, number: Number, body: InvoiceMark) -> Document:
    """Mark an invoice as paid or void. Books no money."""
    state = InvoiceState(body.state)
    return invoices.mark_invoice(books, number=number, state=state, by=by.name, why=body.why)


@router.post("/invoices/{number}/credit", status_code=201)
def credit_invoice(by: MayChange, books: Books, number: Number, body: AdminBody) -> Document:
    """A credit note for the corrections made to an invoice's charges since it was issued."""
    return invoices.credit_invoice(books, number=number, by=by.name, why=body.why)
