"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the same chats."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admission import deliver
from api.collaborators import Collaborators
from api.context import arrive, received
from api.relay.protocol import MESSAGES
from api.routes.conversation import Chat, chat_of, compared
from api.routes.prompts import encoded_chat
from api.routes.relayed import relayed
from api.served_model import find_model
from api.shapes.body import parse
from api.shapes.messages import CountBody, Diagnostics, MessagesBody
from api.shapes.messages_format import MessagesFormat, anthropic_diagnostics

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
    chat = await chat_of(arrival, asked)
    wire_format = await _format(arrival.wire, arrival.principal.tenant, chat, body.diagnostics)
    return await deliver(arrival, chat.job, asked.extension, wire_format)


async def _format(
    wire: Collaborators, tenant: str, chat: Chat, asked: Diagnostics | None
) -> MessagesFormat:
    """The answer's format; with diagnostics, its prompt is known to later requests."""
    if asked is None:
        return MessagesFormat(chat.job, chat.new_reply())
    previous = asked.previous_message_id
    salt = wire.access.salts.of_tenant(tenant)
    found = await compared(wire, tenant, chat, previous)

    def keep(name: str) -> None:
        if not wire.records.purges.reach(salt, chat.job.arrival_ns):
            wire.records.fingerprints.put(salt, name, chat.fingerprint())

    diagnostics = anthropic_diagnostics(previous, found)
    return MessagesFormat(chat.job, chat.new_reply(), diagnostics=diagnostics, keep=keep)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> dict[str, Any]:
    """The number of prompt tokens that the same body would have."""
    arrival, body = await arrive(request, CountBody)
    wire, tenant = arrival.wire, arrival.principal.tenant
    model = find_model(wire.inference.models, body.model)
    tokens = await encoded_chat(wire, model, body.as_chat(model), tenant=tenant)
    return {"input_tokens": len(tokens)}
