"""POST /v1/chat/completions: messages in, one assistant message per choice out."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admission import deliver
from api.context import received
from api.relay.protocol import CHAT
from api.routes.conversation import chat_of
from api.routes.relayed import relayed
from api.shapes.body import parse
from api.shapes.chat import ChatFormat
from api.shapes.schemas import ChatBody

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(request: Request) -> Response:
    """Answers as JSON, or as server-sent events with `stream`."""
    arrival = await received(request, queues=True)
    if (passed := await relayed(arrival, CHAT)) is not None:
        return passed
    body = parse(arrival.raw, ChatBody)
    job, new_reply = await chat_of(arrival, body)
    wire_format = ChatFormat(
        job,
        [new_reply() for _ in range(body.n or 1)],
        logprobs=body.logprobs_asked is not None,
        usage_follows=body.wants_usage_chunk,
    )
    return await deliver(arrival, job, body.extension, wire_format)
