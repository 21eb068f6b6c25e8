"""The money routes under `/admin/api` as one router."""

from fastapi import APIRouter

from api.admin.routes import account as account_routes
from api.admin.routes import ledger as ledger_routes
from api.admin.routes import prices as price_routes

router = APIRouter()
for area in (account_routes, price_routes, ledger_routes):
    router.include_router(area.router)
