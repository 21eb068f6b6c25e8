"""The money routes under `/admin/api` as one router."""

from fastapi import APIRouter

from api.admin import account_routes, ledger_routes, price_routes

router = APIRouter()
for area in (account_routes, price_routes, ledger_routes):
    router.include_router(area.router)
