"""GET /v1/models: the served models in OpenAI's list shape, with OpenRouter's fields for prices."""

from typing import Any

from fastapi import APIRouter, Request

from api.context import authorised, wire_of
from api.served_model import ServedModel, named
from api.shapes.schemas import ChatBody
from billing.errors import NoPrice
from billing.keys import Principal
from billing.money import format_units
from billing.prices.book import PinnedRate
from tiers.tier import TierName

router = APIRouter(tags=["models"])

_SERVED_HERE = {
    "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    "supported_parameters": sorted(ChatBody.model_fields.keys() - {"model", "messages"}),
}


def _card(request: Request, principal: Principal, model: ServedModel) -> dict[str, Any]:
    try:
        pricing = _pricing(wire_of(request).books.meter.rate_of(principal, model.name))
    except NoPrice:
        pricing = None
    card = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "cachesvc",
        "root": model.parent or model.name,
        "parent": model.parent,
        "max_model_len": model.max_context or None,  # of an absent model it is not known
        "context_length": model.max_context or None,
        **(_SERVED_HERE if model.endpoint is None else {}),  # an endpoint's are its own
        "pricing": pricing,
    }
    return card if model.exactness is None else card | {"exactness": dict(model.exactness)}


def _pricing(pinned: PinnedRate) -> dict[str, Any]:
    """Currency units a token, as decimal texts. A cached token costs what its tier costs; the one
    price that OpenRouter has for them is the dearest."""
    rates, ref = pinned.rates, pinned.ref
    reads = {tier: rates.of(f"hit_{tier}") for tier in TierName}
    return {
        "prompt": format_units(rates.miss),
        "completion": format_units(rates.output),
        "request": format_units(rates.request),
        "input_cache_read": format_units(max(reads.values())),
        "input_cache_read_by_tier": {tier: format_units(units) for tier, units in reads.items()},
        "input_cache_write": format_units(rates.miss + rates.cache_write),
        "currency": pinned.currency,
        "card": ref.card,
        "version": ref.version,
        "window": ref.window,
    }


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def list_models(request: Request) -> dict[str, Any]:
    """The served model and its adapters."""
    principal = await authorised(request)
    models = wire_of(request).inference.models.values()
    return {"object": "list", "data": [_card(request, principal, model) for model in models]}


@router.get("/v1/models/{name:path}")
@router.get("/models/{name:path}", include_in_schema=False)
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """One model or adapter; 404 if the name is not served."""
    principal = await authorised(request)
    return _card(request, principal, named(wire_of(request).inference.models, name))
