"""POST /v1/cache/quote: what a request would hit and cost now, without computing it."""

from typing import Any

from fastapi import APIRouter, Request

from api.context import authorised, read_body, wire_of
from api.job import Job
from api.routes.completions import completion_job
from api.routes.conversation import chat_of
from api.shapes.body import parse
from api.shapes.schemas import ChatBody, CompletionBody, QuoteBody
from billing.keys import Principal

router = APIRouter(tags=["caches"])


@router.post("/v1/cache/quote")
async def quote(request: Request) -> dict[str, Any]:
    """Quotes the body of a chat (`messages`) or a completion (`prompt`) as it would be sent."""
    principal = await authorised(request)
    wire = wire_of(request)
    wire.access.queue.check_wait(principal.tenant)
    job = await quoted_job(request, principal, await read_body(request))
    return (await wire.cache.quotes.of(principal, job)).as_json()


async def quoted_job(request: Request, principal: Principal, raw: bytes) -> Job:
    """The job of a body. Raises what is wrong with it, by field."""
    if parse(raw, QuoteBody).messages is not None:
        return (await chat_of(request, principal, parse(raw, ChatBody), raw)).job
    return await completion_job(request, principal, parse(raw, CompletionBody), raw)
