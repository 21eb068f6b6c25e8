"""GET /admin/api/stats, /history and /window: what the server does now, and did of late."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from api.admin.access import MayRead
from api.admin.parts import parts_of
from api.errors import Unsupported

router = APIRouter(prefix="/admin/api", tags=["admin"])

MAX_SERIES = 100


@router.get("/whoami")
async def whoami(found: MayRead) -> dict[str, str]:
    """Whom the server takes the caller for."""
    return {"name": found.name, "role": found.role}


@router.get("/stats")
async def stats(request: Request, _: MayRead) -> Mapping[str, Any]:
    """One snapshot of engine, tiers, traffic and money. Sizes in bytes, times in seconds."""
    return parts_of(request).stats()


@router.get("/history")
async def history(
    request: Request,
    _: MayRead,
    series: Annotated[list[str], Query(max_length=MAX_SERIES)],
    window_s: Annotated[float, Query(gt=0)] = 600.0,
    since_s: Annotated[float, Query(ge=0)] = 0.0,
) -> Mapping[str, Any]:
    """`series` over the last `window_s` seconds, or what came after `since_s` (Unix seconds)."""
    source = parts_of(request).history
    if source is None:
        raise Unsupported("this server keeps no history")
    return source.read(series, window_s=window_s, since_s=since_s)


@router.get("/window")
async def window(
    request: Request,
    _: MayRead,
    series: Annotated[list[str], Query(max_length=MAX_SERIES)],
    window_s: Annotated[float, Query(gt=0)] = 600.0,
) -> Mapping[str, Any]:
    """Each of `series` as one number, over the whole of the last `window_s` seconds."""
    source = parts_of(request).history
    if source is None:
        raise Unsupported("this server keeps no history")
    return {"window_s": window_s, "series": source.over(series, window_s=window_s)}
