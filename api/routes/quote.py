"""POST /v1/cache/quote: what a request would hit and cost now, without computing it."""

from typing import Any

from fastapi import APIRouter, Request

from api.context import authorised, read_body, wire_of
from api.requests.quote import quote_of
from api.routes.completions import completion_job
from api.routes.conversation import chat_of
from api.shapes.schemas import ChatBody, CompletionBody, QuoteBody, parse

router = APIRouter(tags=["caches"])


@router.post("/v1/cache/quote")
async def quote(request: Request) -> dict[str, Any]:
    """Of the body of a chat (`messages`) or a completion (`prompt`), as it would be sent."""
    principal = await authorised(request)
    wire = wire_of(request)
    wire.queue.check_wait(principal.tenant)
    raw = await read_body(request)
    if parse(raw, QuoteBody).messages is not None:
        job = (await chat_of(request, principal, parse(raw, ChatBody), raw)).job
    else:
        job = await completion_job(request, principal, parse(raw, CompletionBody), raw)
    return (await quote_of(wire, principal, job)).told()
