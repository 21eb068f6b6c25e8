"""GET /admin/api/events: the stream of /v1/cache/events, for the dashboard and for commands."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.access.shares import OPERATOR
from api.admin.access import MayRead
from api.routes.cache_events import feed_for

router = APIRouter(prefix="/admin/api", tags=["admin"])


@router.get("/events")
async def events(request: Request, _: MayRead) -> Response:
    """Events of every tenant's blocks."""
    return feed_for(request, OPERATOR, None)
