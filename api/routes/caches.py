"""/v1/caches: named prefixes that a tenant keeps in the cache, over the API.

A cache is computed when it is created, as a prompt without an answer. It is pinned first, so that a
refusal by the tiers or the balance costs nothing.
"""

import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admission import deliver
from api.collaborators import Collaborators
from api.context import arrive, authorised, wire_of
from api.errors import RecordNotFound, Unsupported
from api.job import Kept
from api.requests.retention import TenantPins
from api.routes.completions import completion_job
from api.routes.conversation import chat_of
from api.shapes.caches import CacheChange, CacheFormat, NewCache, cache_document
from api.shapes.schemas import ChatBody
from billing.keys import Principal
from tiers.blocks.chain import KeyedPrefix

router = APIRouter(prefix="/v1/caches", tags=["caches"])


@router.post("")
async def make_cache(request: Request) -> Response:
    """Keep `messages` or `prompt` for `ttl`. Replaces a cache of the same name."""
    arrival, body = await arrive(request, NewCache)
    name = body.checked_name() or f"cache-{uuid.uuid4().hex[:16]}"
    asked = body.request()
    if isinstance(asked, ChatBody):
        job = (await chat_of(arrival, asked))[0].only_prompt()
    else:
        job = await completion_job(arrival, asked)
    pins = arrival.wire.inference.engine_of(job.model).retention.pins
    prefix = job.chain(0, pins.block_size)
    kept = await pins.keep(f"{job.tenant}:{name}", prefix, body.ttl, owner=job.tenant)
    try:
        wire_format = CacheFormat(cache_document(kept, job.model.name))
        return await deliver(arrival, job, asked.extension, wire_format)
    except BaseException:
        pins.release(kept.pin.name)
        raise


@router.get("")
async def list_caches(request: Request) -> dict[str, Any]:
    """The tenant's caches, breakpoints and sessions."""
    principal, wire = await authorised(request), wire_of(request)
    found = await _all(wire, principal)
    return {"object": "list", "data": [_document(wire, principal, kept) for kept, _ in found]}


@router.get("/{name}")
async def show_cache(request: Request, name: str) -> dict[str, Any]:
    principal, wire = await authorised(request), wire_of(request)
    kept, _ = await _found(wire, principal, name)
    return _document(wire, principal, kept)


@router.patch("/{name}")
async def change_cache(request: Request, name: str) -> dict[str, Any]:
    """Set a cache to expire `ttl` from now."""
    arrival, body = await arrive(request, CacheChange)
    wire, principal = arrival.wire, arrival.principal
    found, pins = await _found(wire, principal, name)
    pin = found.pin
    if pin.kind.gives_way:
        raise Unsupported(f"'{name}' is a {pin.kind}: it lasts as its requests say.", param="ttl")
    kept = await pins.keep(
        pin.name, KeyedPrefix(pin.scope, pin.keys), body.ttl, owner=principal.tenant
    )
    return _document(wire, principal, kept)


@router.delete("/{name}")
async def delete_cache(request: Request, name: str) -> dict[str, Any]:
    """End a cache; its blocks may be evicted."""
    principal = await authorised(request)
    kept, pins = await _found(wire_of(request), principal, name)
    await pins.end(kept.pin.name, owner=principal.tenant)
    return {"id": kept.name, "object": "cache", "deleted": True}


async def _all(wire: Collaborators, principal: Principal) -> list[tuple[Kept, TenantPins]]:
    """What the tenant keeps with each engine, and the pins that keep it."""
    each = [engine.retention.pins for engine in wire.inference.engines]
    return [(kept, pins) for pins in each for kept in await pins.of_owner(principal.tenant)]


async def _found(wire: Collaborators, principal: Principal, name: str) -> tuple[Kept, TenantPins]:
    for kept, pins in await _all(wire, principal):
        if kept.name == name:
            return kept, pins
    raise RecordNotFound(f"There is no cache '{name[:128]}', or it has expired.")


def _document(wire: Collaborators, principal: Principal, kept: Kept) -> dict[str, Any]:
    of_scope = (
        model.name
        for model in wire.inference.models.values()
        if wire.access.salts.scoped(model.scope, principal.tenant).root() == kept.pin.scope
    )
    return cache_document(kept, next(of_scope, None))
