"""GET /admin/api/events: what /v1/cache/events streams, for the dashboard and for commands."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.access.shares import OPERATOR
from api.admin.access import MayRead
from api.routes.cache_events import feed_for

router = APIRouter(prefix="/admin/api", tags=["admin"])


@router.get("/events")
async def events(request: Request, _: MayRead) -> Response:
    """Every tenant's blocks, as they come, move and go."""
    return feed_for(request, OPERATOR, None)
