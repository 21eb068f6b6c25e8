"""All admin routes as one router, and the parts that each of their requests carries."""

from collections.abc import Callable

from fastapi import APIRouter, Depends, Request

from api.admin import blocks, events, money_routes, stats
from api.admin.parts import AdminParts


def admin_router(parts: AdminParts) -> APIRouter:
    """The routes under `/admin`, over `parts`; for `create_app(routers=...)`."""
    router = APIRouter(dependencies=[Depends(_carry(parts))])
    for area in (stats, events, blocks, money_routes):
        router.include_router(area.router)
    return router


def _carry(parts: AdminParts) -> Callable[[Request], None]:
    """A dependency that runs before all others of a route and lets them find `parts`."""

    async def carry(request: Request) -> None:
        request.state.admin_parts = parts

    return carry  # type: ignore[return-value]
