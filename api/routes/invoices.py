"""/v1/invoices: what a customer was sent. Only ever of the caller's own tenant, and no drafts."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from api.context import authorised, wire_of
from api.errors import Unsupported
from api.shapes.invoice import invoice_answer
from billing.invoices.register import InvoiceRegister
from billing.invoices.render import Form, render, summary
from billing.keys import Scope

router = APIRouter(prefix="/v1/invoices", tags=["usage"])

Read = TypeVar("Read")
Number = Annotated[str, Path(pattern=r"^[A-Z0-9-]{1,40}$", description="Such as INV-000012")]


async def _read(request: Request, read: Callable[[InvoiceRegister, str], Read]) -> Read:
    principal = await authorised(request, Scope.USAGE)
    store = wire_of(request).ledger_store
    if store is None:
        raise Unsupported("this server keeps no accounts")
    return await asyncio.to_thread(read, InvoiceRegister(store), principal.tenant)


@router.get("")
async def invoices(request: Request) -> list[dict[str, Any]]:
    """Your invoices and credit notes, the newest first."""

    def read(register: InvoiceRegister, tenant: str) -> list[dict[str, Any]]:
        return [summary(each) for each in register.listing(tenant)]

    return await _read(request, read)


@router.get("/{number}", response_model=None)
async def invoice(
    request: Request, number: Number, form: Annotated[Form, Query(alias="format")] = Form.JSON
) -> Response:
    """One of them, as JSON, CSV, a page to print, or PDF."""

    def read(register: InvoiceRegister, tenant: str) -> dict[str, Any] | bytes:
        found = register.find(number, tenant=tenant)
        return found.as_json() if form is Form.JSON else render(found, form)

    return invoice_answer(await _read(request, read), form, number)
