"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the same chats."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admission import deliver
from api.collaborators import Collaborators
from api.context import authorised, read_body, request_log_of, wire_of
from api.routes.conversation import Chat, Mark, chat_of, chat_prompt, compared
from api.routes.models import find_model
from api.routes.prompts import encode_chat
from api.shapes.body import parse
from api.shapes.breakpoints import TTL_S
from api.shapes.messages import CountBody, Diagnostics, MarkedPlace, MessagesBody
from api.shapes.messages_format import MessagesFormat, anthropic_diagnostics
from api.shapes.template_arguments import fitting_thinking

router = APIRouter(tags=["messages"])


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    """A message as JSON, or as Anthropic's events with `stream`."""
    principal = await authorised(request)
    wire = wire_of(request)
    wire.access.queue.check_wait(principal.tenant)
    raw = await read_body(request)
    body = parse(raw, MessagesBody)
    request_log_of(request).add(ignored_fields=body.ignored or None)
    model = find_model(wire.inference.models, body.model)
    thinking = fitting_thinking(body.thinking, model.tokenizer.chat_template)
    sees = model.images is not None
    asked = body.generation(sees_images=sees).model_copy(update={"thinking": thinking})
    chat = await chat_of(request, principal, asked, raw, marks=_marks(body, sees_images=sees))
    wire_format = await _format(wire, principal.tenant, chat, body.diagnostics)
    return await deliver(request, principal, chat.job, asked, wire_format, raw)


async def _format(
    wire: Collaborators, tenant: str, chat: Chat, asked: Diagnostics | None
) -> MessagesFormat:
    """The answer's format; with diagnostics, its prompt is known to later requests."""
    if asked is None:
        return MessagesFormat(chat.job, chat.new_reply)
    previous = asked.previous_message_id
    salt = wire.access.salts.of_tenant(tenant)
    found = await compared(wire, tenant, chat, previous)

    def keep(name: str) -> None:
        if not wire.records.purges.reach(salt, chat.job.arrival_ns):
            wire.records.fingerprints.put(salt, name, chat.fingerprint())

    diagnostics = anthropic_diagnostics(previous, found)
    return MessagesFormat(chat.job, chat.new_reply, diagnostics=diagnostics, keep=keep)


def _marks(body: MessagesBody, *, sees_images: bool) -> list[Mark]:
    """The last breakpoint of each ttl, without those that a later, longer-lived one covers."""
    last: dict[str, MarkedPlace] = {}
    for point in body.breakpoints():
        last[point.ttl] = point
        if point.ttl == "1h":
            last.pop("5m", None)
    marks = []
    for ttl, point in last.items():
        cut = body.until(point)
        chat = cut.as_chat(sees_images=sees_images, whole=False) if cut is not None else None
        marks.append(Mark(TTL_S[ttl], chat))
    return marks


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> dict[str, Any]:
    """The number of prompt tokens that the same body would have."""
    principal = await authorised(request)
    wire = wire_of(request)
    body = parse(await read_body(request), CountBody)
    model = find_model(wire.inference.models, body.model)
    thinking = fitting_thinking(body.thinking, model.tokenizer.chat_template)
    asked = body.as_chat(sees_images=model.images is not None)
    asked = asked.model_copy(update={"thinking": thinking})
    prompt = chat_prompt(wire, model, asked)
    encoded = await encode_chat(wire, model, prompt, tenant=principal.tenant)
    return {"input_tokens": len(encoded.tokens)}
