"""Keys, of all tenants: the page /admin/keys.

A plain function: the server runs it on its thread pool, because it reads the ledger's database.
"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.access import MayRead
from api.admin.pages.base import render
from api.admin.pages.filters import Filter
from api.admin.parts import books_of
from billing.operations import keys as operations

router = APIRouter(prefix="/admin", include_in_schema=False)


@router.get("/keys")
def keys_page(
    request: Request, admin: MayRead, tenant: Filter = "", state: Filter = ""
) -> Response:
    books = books_of(request)
    keys = operations.keys_of(books, tenant or None)
    return render(
        request,
        "keys.html",
        admin,
        keys=[each for each in keys if state in ("", each["state"])],
        tenants=[each.tenant for each in books.accounts.tenants()],
        scopes=operations.USUAL_SCOPES,
        tenant=tenant,
        state=state,
    )
