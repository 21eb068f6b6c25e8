"""All admin routes as one router, with the parts that each request carries."""

from collections.abc import Callable

from fastapi import APIRouter, Depends, Request

from api.admin.pages import assets, login
from api.admin.pages import audit as pages_audit
from api.admin.pages import explorer as pages_explorer
from api.admin.pages import front as pages_front
from api.admin.pages import keys as pages_keys
from api.admin.pages import money as pages_money
from api.admin.pages import overview as pages_overview
from api.admin.pages import pins as pages_keeping
from api.admin.pages import requests as pages_requests
from api.admin.pages import tenants as pages_tenants
from api.admin.pages import working_set as pages_working_set
from api.admin.parts import AdminParts
from api.admin.routes import derived, stats
from api.admin.routes import ledger as ledger_routes
from api.admin.routes import prompts as prompt_routes

AREAS = (
    assets.router,
    login.router,
    derived.router,
    ledger_routes.router,
    prompt_routes.router,
    pages_audit.router,
    pages_explorer.router,
    pages_front.router,
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
    """A dependency that runs before a route's others and gives them `parts`."""

    async def carry(request: Request) -> None:
        request.state.admin_parts = parts

    return carry  # type: ignore[return-value]
