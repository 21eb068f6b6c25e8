"""GET /v1/cache/requests/{id}: what became of one's own request, and why its prompt missed."""

from typing import Any

from fastapi import APIRouter, Request

from api.context import authorised, wire_of
from api.errors import RequestNotFound
from api.journal.documents import details
from billing.keys import Scope

router = APIRouter(prefix="/v1/cache", tags=["cache"])


@router.get("/requests/{request_id}")
async def request_details(request: Request, request_id: str) -> dict[str, Any]:
    """By the `id` of the answer, or the X-Request-Id: timeline, hits by block, reasons and bill.

    Kept in memory for the latest requests. Another tenant's request does not exist for the caller.
    """
    principal = await authorised(request, Scope.USAGE)
    record = wire_of(request).journal.find(request_id, tenant=principal.tenant)
    if record is None:
        raise RequestNotFound(
            f"This server remembers no request {request_id[:80]!r} of tenant "
            f"'{principal.tenant}'; it keeps the latest in memory only."
        )
    return details(record)
