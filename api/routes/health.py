"""Routes for monitoring: alive, ready, metrics. None of them needs a key."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from api.context import wire_of

router = APIRouter(tags=["health"])


@router.get("/health")
@router.head("/health", include_in_schema=False)  # site monitors use HEAD
@router.head("/", include_in_schema=False)  # agents look there whether somebody answers
async def alive(request: Request) -> Response:
    """200 while the process works; 503 with the reason if only a restart helps."""
    state = wire_of(request).readiness()
    if state.alive:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "failed", "reason": state.reason}, status_code=503)


@router.get("/health/ready")
@router.head("/health/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 if requests can be served now, else 503 with the reason."""
    state = wire_of(request).readiness()
    body = {"status": "ready" if state.ready else "not ready", "reason": state.reason}
    return JSONResponse(body | dict(state.detail), status_code=200 if state.ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics as Prometheus text."""
    body, content_type = wire_of(request).render_metrics()
    return Response(body, headers={"Content-Type": content_type})
