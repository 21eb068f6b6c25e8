"""A caller's own balance and requests, and the keys that sign receipts."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from api.context import authorised, wire_of
from api.errors import RecordNotFound
from api.journal.documents import details
from billing.keys import Scope
from billing.money import format_units

router = APIRouter()


@router.get("/user/balance", tags=["balance"])
@router.get("/v1/user/balance", include_in_schema=False)
async def user_balance(request: Request) -> dict[str, Any]:
    """Amounts are decimal strings. Debt is subtracted; holds of running requests are not.

    A tenant without a credit limit, such as that of a server without keys, never shows less than 0:
    it owes nothing that would stop it. `/v1/usage/account` has its debt.
    """
    principal = await authorised(request, Scope.USAGE)
    account = await asyncio.to_thread(wire_of(request).books.balances, principal.tenant)
    available = account.available
    has_money = available is None or available > 0
    total, topped_up = account.balance, account.topup - account.owed
    if available is None:
        total, topped_up = max(0, total), max(0, topped_up)
    balance = {
        "currency": account.currency,
        "total_balance": format_units(total),
        "granted_balance": format_units(account.granted),
        "topped_up_balance": format_units(topped_up),
    }
    return {"is_available": not account.suspended and has_money, "balance_infos": [balance]}


@router.get("/v1/receipts/keys", tags=["receipts"])
async def receipt_keys(request: Request) -> dict[str, list[dict[str, str]]]:
    """Every public key that ever signed here, in hex (Ed25519, 32 bytes). A receipt names its
    `key_id`."""
    await authorised(request, Scope.USAGE)
    keys = wire_of(request).books.opened.signer.published
    return {"keys": [{"key_id": name, "public_key": key} for name, key in keys.items()]}


@router.get("/v1/cache/requests/{request_id}", tags=["cache"])
async def request_details(request: Request, request_id: str) -> dict[str, Any]:
    """A request by its answer's `id` or its X-Request-Id: timeline, hits by block, reasons and
    bill.

    Recent requests are kept. Another tenant's request is not found.
    """
    principal = await authorised(request, Scope.USAGE)
    journal = wire_of(request).records.journal
    record = journal.find(request_id, tenant=principal.tenant)
    if record is None:
        raise RecordNotFound(
            f"This server remembers no request {request_id[:80]!r} of tenant "
            f"'{principal.tenant}'; it keeps the latest {journal.settings.max_requests:,}."
        )
    return details(record)
