"""GET /v1/models: the served models in OpenAI's list shape."""

from typing import Any

from fastapi import APIRouter, Request

from api.context import authorised, wire_of
from api.served_model import ServedModel, find_model

router = APIRouter(tags=["models"])


def card(model: ServedModel) -> dict[str, Any]:
    card = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "root": model.parent or model.name,
        "parent": model.parent,
        "max_model_len": model.max_context,
    }
    return card if model.exactness is None else card | {"exactness": dict(model.exactness)}


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def list_models(request: Request) -> dict[str, Any]:
    """The served model and its adapters."""
    await authorised(request)
    models = wire_of(request).inference.models
    return {"object": "list", "data": [card(model) for model in models.values()]}


@router.get("/v1/models/{name:path}")
@router.get("/models/{name:path}", include_in_schema=False)
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """One model or adapter; 404 if the name is not served."""
    await authorised(request)
    return card(find_model(wire_of(request).inference.models, name))
