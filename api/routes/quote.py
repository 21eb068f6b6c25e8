"""POST /v1/cache/quote: what a request would hit and cost now, without computing it."""

from typing import Any

from fastapi import APIRouter, Request

from api.context import Arrival, arrive
from api.job import Job
from api.routes.completions import completion_job
from api.routes.conversation import chat_of
from api.shapes.body import parse
from api.shapes.schemas import ChatBody, CompletionBody, QuoteBody

router = APIRouter(tags=["caches"])


@router.post("/v1/cache/quote")
async def quote(request: Request) -> dict[str, Any]:
    """Quotes the body of a chat (`messages`) or a completion (`prompt`) as it would be sent."""
    arrival, body = await arrive(request, QuoteBody, queues=True)
    job = await quoted_job(arrival, body)
    quotes = arrival.wire.inference.engine_of(job.model).quotes
    return (await quotes.of(arrival.principal, job)).as_json()


async def quoted_job(arrival: Arrival, body: QuoteBody) -> Job:
    """The job of a body. Raises what is wrong with it, by field."""
    if body.messages is not None:
        return (await chat_of(arrival, parse(arrival.raw, ChatBody)))[0]
    return await completion_job(arrival, parse(arrival.raw, CompletionBody))
