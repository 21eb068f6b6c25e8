"""/v1/invoices: the invoices issued to the caller's own tenant, without drafts."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from api.routes.usage import read_own
from api.shapes.invoice import invoice_answer
from billing.invoices.register import InvoiceRegister
from billing.invoices.render import Form, render, summary
from billing.store.store import LedgerStore

router = APIRouter(prefix="/v1/invoices", tags=["usage"])

Number = Annotated[str, Path(pattern=r"^[A-Z0-9-]{1,40}$", description="Such as INV-000012")]


@router.get("")
async def invoices(request: Request) -> list[dict[str, Any]]:
    """Your invoices and credit notes, newest first."""

    return await read_own(
        request, lambda store, tenant: [*map(summary, InvoiceRegister(store).listing(tenant))]
    )


@router.get("/{number}", response_model=None)
async def invoice(
    request: Request, number: Number, form: Annotated[Form, Query(alias="format")] = Form.JSON
) -> Response:
    """One invoice or credit note, as JSON, CSV, a printable page or PDF."""

    def read(store: LedgerStore, tenant: str) -> dict[str, Any] | bytes:
        found = InvoiceRegister(store).find(number, tenant=tenant)
        return found.as_json() if form is Form.JSON else render(found, form)

    return invoice_answer(await read_own(request, read), form, number)
