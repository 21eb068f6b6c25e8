"""Keys, of all tenants: pages under /admin/keys.

Plain functions: the server runs them on its thread pool, because they use the ledger's database.
"""

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from api.admin.access import MayChange, MayRead
from api.admin.login.sessions import Admin
from api.admin.pages.base import render
from api.admin.pages.filters import Filter
from api.admin.pages.operation_forms import DONE, FORMS, Sent
from api.admin.parts import books_of
from billing.operations import keys as operations

router = APIRouter(prefix="/admin", include_in_schema=False)


@router.get("/keys")
def keys_page(
    request: Request, admin: MayRead, tenant: Filter = "", state: Filter = "", done: Filter = ""
) -> Response:
    return _keys(request, admin, tenant=tenant, state=state, done=done)


@router.post("/keys")
def create_key(request: Request, admin: MayChange, sent: Sent) -> Response:
    """A new key, shown by this answer only."""
    wrong, made = FORMS["key"].submit(request, admin, sent)
    tenant, key = str(sent.get("tenant", "")), made["key"] if made is not None else ""
    return _keys(request, admin, tenant=tenant, wrong=wrong, key=key)


@router.post("/keys/{key_id}/revoke")
def revoke_key(request: Request, key_id: str, admin: MayChange, sent: Sent) -> Response:
    wrong, _ = FORMS["revoke"].submit(request, admin, sent, key_id=key_id)
    if wrong:
        return _keys(request, admin, wrong=wrong)
    return RedirectResponse("/admin/keys?done=revoke", 303)


def _keys(
    request: Request,
    admin: Admin,
    *,
    tenant: str = "",
    state: str = "",
    wrong: str = "",
    done: str = "",
    key: str = "",
) -> Response:
    books = books_of(request)
    keys = operations.keys_of(books, tenant or None)
    answer = render(
        request,
        "keys.html",
        admin,
        keys=[each for each in keys if state in ("", each["state"])],
        tenants=[each.tenant for each in books.accounts.tenants()],
        form=FORMS["key"],
        scopes=operations.USUAL_SCOPES,
        tenant=tenant,
        state=state,
        key=key,
        wrong=wrong,
        done=DONE.get(done, ""),
    )
    answer.headers["Cache-Control"] = "no-store"
    return answer
