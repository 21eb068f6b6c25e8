"""GET /user/balance: what the caller's tenant has left, in DeepSeek's shape."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from api.context import authorised, wire_of
from billing.keys import Scope
from billing.money import format_units

router = APIRouter(tags=["balance"])


@router.get("/user/balance")
@router.get("/v1/user/balance", include_in_schema=False)
async def user_balance(request: Request) -> dict[str, Any]:
    """Amounts are decimal strings. What running requests hold is not taken off; what is owed is."""
    principal = await authorised(request, Scope.USAGE)
    account = await asyncio.to_thread(wire_of(request).balances, principal.tenant)
    available = account.available
    balance = {
        "currency": account.currency,
        "total_balance": format_units(account.balance),
        "granted_balance": format_units(account.granted),
        "topped_up_balance": format_units(account.topup - account.owed),
    }
    return {
        "is_available": not account.suspended and (available is None or available > 0),
        "balance_infos": [balance],
    }
