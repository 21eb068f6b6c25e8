"""POST /tokenize and /detokenize: texts and chats to the model's tokens, and back."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from api.collaborators import Collaborators
from api.context import authorised, read_body, wire_of
from api.errors import InvalidRequest
from api.routes.conversation import chat_prompt
from api.routes.models import find_model
from api.routes.prompts import encode_chat, encode_text
from api.served_model import ServedModel
from api.shapes.body import MESSAGES_MAX, Body, Items, parse
from api.shapes.message import Message
from api.shapes.schemas import IDS_MAX, ChatBody

router = APIRouter(tags=["tokens"])


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: Annotated[list[Message], Field(max_length=MESSAGES_MAX, fail_fast=True)] | None = None
    tools: Items[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    def as_chat(self, model: str) -> ChatBody:
        """The body as a chat."""
        fields = {"messages", "tools", "chat_template_kwargs", "add_generation_prompt"}
        given = {name: getattr(self, name) for name in fields & self.model_fields_set}
        return ChatBody.model_construct(model=model, **given)


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=IDS_MAX, fail_fast=True)]


@router.post("/tokenize")
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(request: Request) -> dict[str, Any]:
    """Token ids and their count for `prompt` (or `text`), or for `messages` in the chat
    template."""
    tenant = (await authorised(request)).tenant
    wire = wire_of(request)
    body = parse(await read_body(request), TokenizeBody)
    model = _model(wire, body.model)
    text = body.prompt if body.prompt is not None else body.text
    if (text is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt (a text) or messages (a chat).", param="prompt")
    if body.messages is not None:
        prompt = chat_prompt(wire, model, body.as_chat(model.name))
        tokens = (await encode_chat(wire, model, prompt, tenant=tenant)).tokens
    else:
        tokens = await encode_text(wire, model, text or "", tenant=tenant)
    return {
        "model": model.name,
        "tokens": list(tokens),
        "count": len(tokens),
        "max_model_len": model.max_context,
    }


@router.post("/detokenize")
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of `tokens`."""
    await authorised(request)
    wire = wire_of(request)
    body = parse(await read_body(request), DetokenizeBody)
    model = _model(wire, body.model)
    if body.tokens and (highest := max(body.tokens)) >= model.vocab_size:
        raise InvalidRequest(
            f"tokens has the id {highest}; this model's ids are 0..{model.vocab_size - 1}.",
            param="tokens",
        )
    return {"model": model.name, "prompt": model.tokenizer.decode(body.tokens)}


def _model(wire: Collaborators, name: str | None) -> ServedModel:
    """The named model, or the first one served."""
    return (
        find_model(wire.inference.models, name)
        if name
        else next(iter(wire.inference.models.values()))
    )
