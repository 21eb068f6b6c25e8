"""POST /tokenize and /detokenize: texts and chats to the model's tokens, and back."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from api.context import arrive
from api.errors import InvalidRequest
from api.routes.prompts import encode_prompt, encoded_chat
from api.served_model import find_model
from api.shapes.body import Body, Items
from api.shapes.message import FunctionTool
from api.shapes.schemas import IDS_MAX, ChatBody, Messages

router = APIRouter(tags=["tokens"])


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: Messages | None = None
    tools: Items[FunctionTool] | None = None
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
    arrival, body = await arrive(request, TokenizeBody)
    wire, tenant = arrival.wire, arrival.principal.tenant
    model = find_model(wire.inference.models, body.model)
    text = body.prompt if body.prompt is not None else body.text
    if (text is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt (a text) or messages (a chat).", param="prompt")
    if text is not None:
        tokens = await encode_prompt(wire, model, text, tenant=tenant)
    else:
        tokens = await encoded_chat(wire, model, body.as_chat(model.name), tenant=tenant)
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
    arrival, body = await arrive(request, DetokenizeBody)
    model = find_model(arrival.wire.inference.models, body.model)
    if body.tokens and (highest := max(body.tokens)) >= model.vocab_size:
        raise InvalidRequest(
            f"tokens has the id {highest}; this model's ids are 0..{model.vocab_size - 1}.",
            param="tokens",
        )
    return {"model": model.name, "prompt": model.tokenizer.decode(body.tokens)}
