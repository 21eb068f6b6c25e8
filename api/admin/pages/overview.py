"""The overview: running requests, latency, hits and revenue. And the cache: what each tier holds,
serves, moves and evicts. And what a browser sees first."""

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from api.admin.access import MayRead
from api.admin.pages.base import render
from api.admin.parts import parts_of
from api.journal.why import FAULTS
from tiers.errors import MissReason

router = APIRouter(include_in_schema=False)

MEANINGS: Final = {
    MissReason.ABSENT: "no tier held the block",
    MissReason.ARITHMETIC: "held, but computed by another processor, device or torch",
    MissReason.TAIL: "the last, partly filled block, or the one token that is always computed",
    MissReason.SLOWER_THAN_COMPUTE: "computing was faster than loading",
    MissReason.OVERLOADED: "the queue of loads was full",
    MissReason.NO_ROOM: "no free memory to load into",
    MissReason.DISABLED: "the request or the server turned the cache off",
    MissReason.UNREPORTED: "an engine elsewhere did not say what it had cached",
    **FAULTS,
}


@router.get("/")
async def front() -> Response:
    return RedirectResponse("/admin", 307)


@router.get("/docs")
async def api() -> Response:
    """Any viewer of OpenAPI shows it. FastAPI's own would load scripts of others here."""
    return RedirectResponse("/openapi.json", 307)


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
        currencies=parts.currencies(),
        base_url=str(request.base_url).rstrip("/"),
    )


@router.get("/admin/cache")
async def cache(request: Request, found: MayRead) -> Response:
    return render(
        request,
        "cache.html",
        found,
        stats=parts_of(request).stats(),
        reasons=list(MEANINGS.items()),
        faults=list(FAULTS),
    )
