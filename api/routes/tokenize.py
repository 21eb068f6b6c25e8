"""POST /tokenize and /detokenize: what a text or a chat is in the model's tokens, and back."""

from typing import Any

from fastapi import APIRouter, Request

from api.collaborators import Collaborators, ServedModel
from api.context import authorised, wire_of
from api.errors import InvalidRequest
from api.routes.models import find_model
from api.routes.prompts import encode_chat, encode_text
from api.shapes.schemas import DetokenizeBody, TokenizeBody, parse

router = APIRouter(tags=["tokens"])


@router.post("/tokenize")
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(request: Request) -> dict[str, Any]:
    """Ids and their count of `prompt` (or `text`), or of `messages` under the chat template."""
    await authorised(request)
    wire = wire_of(request)
    body = parse(await request.body(), TokenizeBody)
    model = _model(wire, body.model)
    text = body.prompt if body.prompt is not None else body.text
    if (text is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt (a text) or messages (a chat).", param="prompt")
    if body.messages is not None:
        tokens = await encode_chat(
            wire,
            model,
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
    else:
        tokens = await encode_text(wire, model, text or "")
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
    body = parse(await request.body(), DetokenizeBody)
    model = _model(wire, body.model)
    if body.tokens and (highest := max(body.tokens)) >= model.vocab_size:
        raise InvalidRequest(
            f"tokens has the id {highest}; this model's ids are 0..{model.vocab_size - 1}.",
            param="tokens",
        )
    return {"model": model.name, "prompt": model.tokenizer.decode(body.tokens)}


def _model(wire: Collaborators, name: str | None) -> ServedModel:
    """The named model, or the first one served."""
    return find_model(wire.models, name) if name else next(iter(wire.models.values()))
