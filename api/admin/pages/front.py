"""What a browser sees first: the dashboard at `/`, and what the API is at `/docs`."""

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

router = APIRouter(include_in_schema=False)


@router.get("/")
async def front() -> Response:
    return RedirectResponse("/admin", 307)


@router.get("/docs")
async def api() -> Response:
    """Any viewer of OpenAPI shows it. FastAPI's own would load scripts of others here."""
    return RedirectResponse("/openapi.json", 307)
