"""POST /v1/chat/completions: messages in, one assistant message per choice out."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admission import deliver
from api.context import authorised, read_body, wire_of
from api.routes.conversation import chat_of
from api.shapes.body import parse
from api.shapes.chat import ChatFormat
from api.shapes.schemas import ChatBody

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(request: Request) -> Response:
    """Answers as JSON, or as server-sent events with `stream`."""
    principal = await authorised(request)
    wire_of(request).access.queue.check_wait(principal.tenant)
    raw = await read_body(request)
    body = parse(raw, ChatBody)
    chat = await chat_of(request, principal, body, raw)
    wire_format = ChatFormat(
        chat.job,
        chat.new_reply,
        logprobs=body.logprobs_asked is not None,
        usage_follows=body.wants_usage_chunk,
    )
    return await deliver(request, principal, chat.job, body, wire_format, raw)
