"""What `cachesvc explain` asks: what a request would hit, and where two prompts diverge.

The command line has a request in a file and asks before sending it. Quotes and divergences are for
admins only: if the journal keeps prompts, these routes can show any tenant's.
"""

import json
from array import array
from typing import Any

from fastapi import APIRouter, Request

from api.access.shares import OPERATOR
from api.admin.access import MayChange
from api.admin.cache import must_exist
from api.admin.parts import parts_of
from api.admin.routes.derived import Name, StrictBody
from api.context import Arrival, request_log_of, wire_of
from api.errors import InvalidRequest, RecordNotFound
from api.job import Job
from api.requests.turns import common_length
from api.routes.quote import quoted_job
from api.served_model import find_model
from api.shapes.body import parse
from api.shapes.schemas import QuoteBody
from billing.keys import Principal

router = APIRouter(prefix="/admin/api")

AROUND = 12  # tokens shown on either side of a divergence


class ExplainedPrompt(StrictBody):
    """A request's body as it would be sent, and its tenant."""

    tenant: Name
    request: dict[str, Any]


class Pair(StrictBody):
    """Two bodies, or ids of two requests whose prompts the journal keeps."""

    tenant: Name
    a: dict[str, Any] | str
    b: dict[str, Any] | str


@router.post("/cache/quote", tags=["admin: cache"])
async def quote(request: Request, body: ExplainedPrompt, _: MayChange) -> dict[str, Any]:
    """Like POST /v1/cache/quote, for any tenant, by the card in its own currency."""
    tenant = await must_exist(request, body.tenant)
    principal = Principal(body.tenant, currency=tenant.currency)
    job = await _job(request, principal, body.request)
    quotes = wire_of(request).inference.engine_of(job.model).quotes
    return (await quotes.of(principal, job)).as_json()


@router.post("/cache/diff", tags=["admin: cache"])
async def diff(request: Request, body: Pair, _: MayChange) -> dict[str, Any]:
    """The first token at which two prompts diverge, and the text around it."""
    models = wire_of(request).inference.models
    (name, one), (second, other) = [
        await _prompt(request, body.tenant, asked) for asked in (body.a, body.b)
    ]
    model = find_model(models, name)
    if model.scope.tokenizer != find_model(models, second).scope.tokenizer:
        raise InvalidRequest(f"'{name}' and '{second}' have different tokenizers.", param="b")
    at = common_length(one, other)
    decode = model.tokenizer.decode
    return {
        "same": at == len(one) == len(other),
        "at_token": at,
        "tokens": [len(one), len(other)],
        "before": decode(one[max(0, at - AROUND) : at]),
        "after": [decode(side[at : at + AROUND]) for side in (one, other)],
    }


async def _job(request: Request, principal: Principal, asked: dict[str, Any]) -> Job:
    raw = json.dumps(asked).encode()
    return await quoted_job(
        Arrival(request, wire_of(request), request_log_of(request), principal, raw),
        parse(raw, QuoteBody),
    )


async def _prompt(
    request: Request, tenant: str, asked: dict[str, Any] | str
) -> "tuple[str, array[int]]":
    """The model's name, and the prompt's tokens."""
    if isinstance(asked, dict):
        job = await _job(request, Principal(tenant or OPERATOR), asked)
        return job.model.name, job.prompts[0]
    record = parts_of(request).journal.find(asked)
    if record is None:
        raise RecordNotFound(f"the server remembers no request {asked[:64]!r}")
    if not record.prompts:
        raise InvalidRequest(
            f"the prompt of {asked[:64]!r} was not stored; set journal.keep_prompts, or give "
            "its body"
        )
    return record.model, record.prompts[0]
