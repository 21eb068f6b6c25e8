"""What `cachesvc explain` asks: what a request would hit.

The command line has a request in a file and asks before sending it. For admins only.
"""

import json
from typing import Any

from fastapi import APIRouter, Request

from api.admin.access import MayChange
from api.admin.cache import must_exist
from api.admin.routes.derived import Name, StrictBody
from api.context import Arrival, request_log_of, wire_of
from api.routes.quote import quoted_job
from api.shapes.body import parse
from api.shapes.schemas import QuoteBody
from billing.keys import Principal

router = APIRouter(prefix="/admin/api")


class ExplainedPrompt(StrictBody):
    """A request's body as it would be sent, and its tenant."""

    tenant: Name
    request: dict[str, Any]


@router.post("/cache/quote", tags=["admin: cache"])
async def quote(request: Request, body: ExplainedPrompt, _: MayChange) -> dict[str, Any]:
    """Like POST /v1/cache/quote, for any tenant, by the card in its own currency."""
    tenant = await must_exist(request, body.tenant)
    principal = Principal(body.tenant, currency=tenant.currency)
    raw = json.dumps(body.request).encode()
    arrival = Arrival(request, wire_of(request), request_log_of(request), principal, raw)
    job = await quoted_job(arrival, parse(raw, QuoteBody))
    quotes = wire_of(request).inference.engine_of(job.model).quotes
    return (await quotes.of(principal, job)).as_json()
