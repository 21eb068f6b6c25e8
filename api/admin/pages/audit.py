"""The audit log under /admin/audit: who changed what, before and after, and why."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.access import MayRead
from api.admin.pages.base import render
from api.admin.pages.filters import Before, Filter
from api.admin.parts import books_of
from billing.reports.documents import trail_document

router = APIRouter(prefix="/admin", include_in_schema=False)

PAGE = 50


@router.get("/audit")
def page(
    request: Request,
    admin: MayRead,
    actor: Filter = "",
    action: Filter = "",
    q: Filter = "",
    before: Before = None,
) -> Response:
    """The newest entries first. `before` is the number of the oldest entry already seen."""
    accounts = books_of(request).accounts
    rows = accounts.trail.newest(
        PAGE + 1, before=before, actor=actor, action=action, text=q.strip()
    )
    return render(
        request,
        "audit.html",
        admin,
        entries=[trail_document(row) for row in rows[:PAGE]],
        older=rows[PAGE - 1]["seq"] if len(rows) > PAGE else None,
        actor=actor,
        action=action,
        q=q,
        before=before,
        actions=accounts.trail.actions(),
    )
