"""The server's state now and in the recent past."""

import gzip
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.admin.access import MayRead
from api.admin.parts import parts_of

router = APIRouter(prefix="/admin/api", tags=["admin"])

MIN_PACKED = 1024  # bytes; compressing less than a packet gains nothing
LEVEL = 4  # of gzip; numbers compress to a fifth at 60 MB/s
MAX_SERIES = 100
MAX_TIME_S = 1e12  # about thirty thousand years; rejects infinity


def json_answer(request: Request, value: Any) -> Response:
    """JSON for the pages' scripts, compressed if it is large enough."""
    body = orjson.dumps(value)
    headers = {"Content-Type": "application/json", "Vary": "Accept-Encoding"}
    if len(body) >= MIN_PACKED and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, LEVEL, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(body, headers=headers)


@router.get("/whoami")
async def whoami(found: MayRead) -> dict[str, str]:
    """The caller's identity, as the server sees it."""
    return {"name": found.name, "role": found.role}


@router.get("/stats")
async def stats(request: Request, _: MayRead) -> Response:
    """One snapshot of engine, tiers, traffic and money. Sizes in bytes, times in seconds."""
    return json_answer(request, parts_of(request).stats())


@router.get("/alerts")
async def alerts(request: Request, _: MayRead) -> Response:
    """What Prometheus fires, where `server.prometheus_url` is set, and what readiness knows."""
    return json_answer(request, list(await parts_of(request).alerts()))


@router.get("/history")
async def history(
    request: Request,
    _: MayRead,
    series: Annotated[list[str] | None, Query(max_length=MAX_SERIES)] = None,
    over: Annotated[list[str] | None, Query(max_length=MAX_SERIES)] = None,
    window_s: Annotated[float, Query(gt=0, le=MAX_TIME_S)] = 600.0,
    since_s: Annotated[float, Query(ge=0, le=MAX_TIME_S)] = 0.0,
) -> Response:
    """`series` over the last `window_s` seconds, or the samples after `since_s` (Unix seconds).

    `over` names series to return as one number for the whole window.
    """
    source = parts_of(request).history
    payload = dict(source.read(series or (), window_s=window_s, since_s=since_s))
    payload["over"] = source.over(over or (), window_s=window_s)
    return json_answer(request, payload)
