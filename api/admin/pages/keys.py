"""Keys, of all tenants: pages under /admin/keys.

Plain functions: the server runs them on its thread pool, because they use the ledger's database.
"""

import time
from typing import Annotated

from fastapi import APIRouter, Form, Request
from starlette.responses import RedirectResponse, Response

from api.admin.access import MayChange, MayRead
from api.admin.login.sessions import Admin
from api.admin.pages.base import render
from api.admin.pages.forms import Filter, Text, reason_in, tried
from api.admin.parts import books_of
from api.errors import InvalidRequest
from billing.keys import Scope
from billing.operations import keys as operations
from billing.operations.books import Books
from billing.reports.documents import key_document

router = APIRouter(prefix="/admin", include_in_schema=False)

DAY_S = 86_400
MAX_DAYS = 3660
DONE = {"revoked": "The key is revoked, from now on."}


@router.get("/keys")
def keys_page(
    request: Request, admin: MayRead, tenant: Filter = "", state: Filter = "", done: Filter = ""
) -> Response:
    return _keys(request, admin, tenant=tenant, state=state, done=done)


@router.post("/keys")
def create_key(
    request: Request,
    admin: MayChange,
    tenant: Text = "",
    name: Text = "",
    scopes: Annotated[list[str] | None, Form()] = None,
    days: Text = "",
    why: Text = "",
) -> Response:
    """A new key, shown by this answer only."""
    made: list[str] = []

    def create(books: Books) -> None:
        document = operations.create_key(
            books,
            tenant=tenant,
            name=name.strip(),
            scopes=operations.known_scopes(scopes or []),
            expires_in_s=_expires_in_s(days),
            by=admin.name,
            why=reason_in(why),
        )
        made.append(document["key"])

    wrong = tried(request, create)
    return _keys(request, admin, tenant=tenant, wrong=wrong, key=made[0] if made else "")


@router.post("/keys/{key_id}/revoke")
def revoke_key(request: Request, key_id: str, admin: MayChange, why: Text = "") -> Response:
    def revoke(books: Books) -> None:
        operations.revoke_key(books, key_id=key_id, by=admin.name, why=reason_in(why))

    wrong = tried(request, revoke)
    if wrong:
        return _keys(request, admin, wrong=wrong)
    return RedirectResponse("/admin/keys?done=revoked", 303)


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
    books, now_ns = books_of(request), time.time_ns()
    keys = [key_document(info, now_ns) for info in books.accounts.keys(tenant or None)]
    answer = render(
        request,
        "keys.html",
        admin,
        keys=[each for each in keys if state in ("", each["state"])],
        tenants=[each.tenant for each in books.accounts.tenants()],
        scopes=list(Scope),
        tenant=tenant,
        state=state,
        key=key,
        wrong=wrong,
        done=DONE.get(done, ""),
    )
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _expires_in_s(days: str) -> int | None:
    if not days.strip():
        return None
    if not days.strip().isdecimal() or len(days) > 9 or not 0 < int(days) <= MAX_DAYS:
        raise InvalidRequest(f"{days!r} is not a number of days from 1 to {MAX_DAYS}")
    return int(days) * DAY_S
