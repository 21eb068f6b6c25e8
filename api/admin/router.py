"""All admin routes as one router, and the parts that each of their requests carries."""

from collections.abc import Callable

from fastapi import APIRouter, Depends, Request

from api.admin import (
    assets,
    blocks,
    cache_routes,
    events,
    login,
    money_routes,
    pages_audit,
    pages_cache,
    pages_explorer,
    pages_keeping,
    pages_keys,
    pages_money,
    pages_overview,
    pages_requests,
    pages_tenants,
    pages_working_set,
    stats,
)
from api.admin.parts import AdminParts

AREAS = (
    assets.router,
    blocks.router,
    cache_routes.router,
    events.router,
    login.router,
    money_routes.router,
    pages_audit.router,
    pages_cache.router,
    pages_explorer.router,
    pages_keeping.router,
    pages_keys.router,
    pages_money.router,
    pages_overview.router,
    pages_requests.router,
    pages_tenants.router,
    pages_working_set.router,
    stats.router,
)


def admin_router(parts: AdminParts) -> APIRouter:
    """The routes under `/admin`, over `parts`; for `create_app(routers=...)`."""
    router = APIRouter(dependencies=[Depends(_carry(parts))])
    for area in AREAS:
        router.include_router(area)
    return router


def _carry(parts: AdminParts) -> Callable[[Request], None]:
    """A dependency that runs before all others of a route and lets them find `parts`."""

    async def carry(request: Request) -> None:
        request.state.admin_parts = parts

    return carry  # type: ignore[return-value]
