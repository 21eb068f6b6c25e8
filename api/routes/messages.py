"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the same chats."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admission import deliver
from api.context import arrive, received
from api.relay.protocol import MESSAGES
from api.routes.conversation import chat_of
from api.routes.prompts import encoded_chat
from api.routes.relayed import relayed
from api.served_model import find_model
from api.shapes.body import parse
from api.shapes.messages import CountBody, MessagesBody
from api.shapes.messages_format import MessagesFormat

router = APIRouter(tags=["messages"])


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    """A message as JSON, or as Anthropic's events with `stream`."""
    arrival = await received(request, queues=True)
    if (passed := await relayed(arrival, MESSAGES)) is not None:
        return passed
    body = parse(arrival.raw, MessagesBody)
    arrival.log.add(ignored_fields=body.ignored or None)
    model = find_model(arrival.wire.inference.models, body.model)
    asked = body.as_chat(model)
    job, new_reply = await chat_of(arrival, asked)
    wire_format = MessagesFormat(job, new_reply())
    return await deliver(arrival, job, asked.extension, wire_format)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> dict[str, Any]:
    """The number of prompt tokens that the same body would have."""
    arrival, body = await arrive(request, CountBody)
    wire, tenant = arrival.wire, arrival.principal.tenant
    model = find_model(wire.inference.models, body.model)
    tokens = await encoded_chat(wire, model, body.as_chat(model), tenant=tenant)
    return {"input_tokens": len(tokens)}
