"""The overview: running requests, latency, hits and revenue."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.access import MayRead
from api.admin.pages.base import render
from api.admin.parts import parts_of
from api.context import wire_of

router = APIRouter(include_in_schema=False)


@router.get("/admin")
@router.get("/admin/")
async def overview(request: Request, found: MayRead) -> Response:
    parts = parts_of(request)
    stats = parts.stats()
    return render(
        request,
        "overview.html",
        found,
        stats=stats,
        alerts=await parts.alerts(),
        currency=parts.currency(),
        models=[each for each in wire_of(request).models.values() if each.exactness],
        base_url=str(request.base_url).rstrip("/"),
    )
