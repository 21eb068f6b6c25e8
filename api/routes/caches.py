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
from api.errors import CacheNotFound, Unsupported
from api.job import Job, Kept
from api.requests.retention import Retention
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
    retention = arrival.wire.cache.retention
    name = body.checked_name() or f"cache-{uuid.uuid4().hex[:16]}"
    asked = body.request()
    if isinstance(asked, ChatBody):
        job = (await chat_of(arrival, asked)).job.only_prompt()
    else:
        job = await completion_job(arrival, asked)
    kept = await _keep(retention, job, name, body.ttl)
    try:
        wire_format = CacheFormat(cache_document(kept, job.model.name))
        return await deliver(arrival, job, asked.extension, wire_format)
    except BaseException:
        retention.pins.release(kept.pin.name)
        raise


@router.get("")
async def list_caches(request: Request) -> dict[str, Any]:
    """The tenant's caches, breakpoints and sessions."""
    principal = await authorised(request)
    wire = wire_of(request)
    caches = [
        _document(wire, principal, kept)
        for kept in await wire.cache.retention.pins.of_owner(principal.tenant)
    ]
    return {"object": "list", "data": caches}


@router.get("/{name}")
async def show_cache(request: Request, name: str) -> dict[str, Any]:
    principal = await authorised(request)
    wire = wire_of(request)
    return _document(wire, principal, await _found(wire, principal, name))


@router.patch("/{name}")
async def change_cache(request: Request, name: str) -> dict[str, Any]:
    """Set a cache to expire `ttl` from now."""
    arrival, body = await arrive(request, CacheChange)
    wire, principal = arrival.wire, arrival.principal
    pin = (await _found(wire, principal, name)).pin
    if pin.kind.gives_way:
        raise Unsupported(f"'{name}' is a {pin.kind}: it lasts as its requests say.", param="ttl")
    pins = wire.cache.retention.pins
    kept = await pins.keep(
        pin.name, KeyedPrefix(pin.scope, pin.keys), body.ttl, owner=principal.tenant
    )
    return _document(wire, principal, kept)


@router.delete("/{name}")
async def delete_cache(request: Request, name: str) -> dict[str, Any]:
    """End a cache; its blocks may be evicted."""
    principal = await authorised(request)
    wire = wire_of(request)
    kept = await _found(wire, principal, name)
    await wire.cache.retention.pins.end(kept.pin.name, owner=principal.tenant)
    return {"id": kept.name, "object": "cache", "deleted": True}


async def _keep(retention: Retention, job: Job, name: str, ttl_s: float) -> Kept:
    """Pin the job's prompt. Raises CacheNotKept and CacheNotPaid."""
    pins = retention.pins
    prefix = job.chain(0, pins.block_size)
    return await pins.keep(f"{job.tenant}:{name}", prefix, ttl_s, owner=job.tenant)


async def _found(wire: Collaborators, principal: Principal, name: str) -> Kept:
    for kept in await wire.cache.retention.pins.of_owner(principal.tenant):
        if kept.name == name:
            return kept
    raise CacheNotFound(f"There is no cache '{name[:128]}', or it has expired.")


def _document(wire: Collaborators, principal: Principal, kept: Kept) -> dict[str, Any]:
    of_scope = (
        model.name
        for model in wire.inference.models.values()
        if wire.access.salts.scoped(model.scope, principal.tenant).root() == kept.pin.scope
    )
    return cache_document(kept, next(of_scope, None))
