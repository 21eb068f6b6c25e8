"""All admin routes as one router, with the parts that each request carries."""

from collections.abc import Callable

from fastapi import APIRouter, Depends, Request

from api.admin.pages import assets, explorer, login, money, overview, requests, tenants
from api.admin.pages.forms import FormRoute
from api.admin.parts import AdminParts
from api.admin.routes import derived, ledger, prompts, stats

_PAGES = (assets, login, explorer, money, overview, requests, tenants)
_OTHERS = tuple(area.router for area in (prompts, stats, *_PAGES))
# What is removed refuses all below its name, so routes there that stand come before.
AREAS = (ledger.router, derived.routes_of(FormRoute), *_OTHERS)


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
