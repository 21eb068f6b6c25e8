"""/admin/api/cache: pins, evictions and purges.

Every change leaves an audit entry. A change is complete, on disk as well, before its answer.
"""

import time
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from api.access.shares import OPERATOR
from api.admin import cache_changes
from api.admin.access import MayChange, MayRead
from api.admin.cache_changes import OwnerKind, must_exist, whole_prefix
from api.admin.parts import CacheAdmin, parts_of
from api.admin.routes.bodies import AdminBody, Name
from api.context import wire_of
from api.errors import InvalidRequest
from api.routes.conversation import chat_prompt
from api.routes.models import find_model
from api.routes.prompts import Encoded, encode_chat, encode_prompt
from api.shapes.message import Message
from api.shapes.schemas import ChatBody
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.contents import block_contents
from tiers.blocks.keys import KEY_BYTES, PrefixKey
from tiers.policy.retention import pin_json

router = APIRouter(prefix="/admin/api/cache", tags=["admin: cache"])

Key = Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$", description="Hex")]
MAX_PIN_S = 366 * 86_400


class NewPin(AdminBody):
    """A prefix, named by its last block's `key` or by the `prompt` or `messages` that begin with
    it."""

    name: Name
    for_s: float = Field(gt=0, le=MAX_PIN_S, description="How long it is kept, in seconds")
    key: Key | None = None
    tenant: Name | None = Field(None, description="Whose prompt it is")
    group: Name | None = Field(None, description="Or which sharing group's")
    model: Annotated[str, Field(max_length=200)] | None = None
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None


class OldPin(AdminBody):
    name: Name


class Eviction(AdminBody):
    keys: list[Key] = Field(min_length=1, max_length=10_000)


class Purging(AdminBody):
    kind: OwnerKind = "tenant"
    name: Name


@router.get("/pins")
async def pins(request: Request, _: MayRead) -> list[dict[str, Any]]:
    """Every pin in force."""
    return [pin_json(pin) for pin in await parts_of(request).cache.pins()]


@router.post("/pin")
async def pin(request: Request, body: NewPin, by: MayChange) -> dict[str, Any]:
    """Pin a prefix, which keeps it in at least one tier. Replaces a pin of that name."""
    prefix = await _prefix(request, body, parts_of(request).cache)
    until_s = time.time() + body.for_s
    return pin_json(
        await cache_changes.pin(request, by, body.name, prefix, until_s=until_s, why=body.why)
    )


@router.post("/unpin")
async def unpin(request: Request, body: OldPin, by: MayChange) -> dict[str, Any]:
    """End a pin; its blocks may be evicted again."""
    await cache_changes.unpin(request, by, body.name, body.why)
    return {"name": body.name, "pinned": False}


@router.post("/evict")
async def evict(request: Request, body: Eviction, by: MayChange) -> dict[str, Any]:
    """Remove blocks from every tier, except those in use or pinned."""
    keys = [PrefixKey(bytes.fromhex(key)) for key in body.keys]
    return {"removed": await cache_changes.evict(request, by, keys, body.why)}


@router.post("/purge")
async def purge(request: Request, body: Purging, by: MayChange) -> dict[str, Any]:
    """Remove every block of a tenant or sharing group from every tier. Returns the signed
    receipt."""
    return await cache_changes.purge(request, by, body.kind, body.name, body.why)


async def _prefix(request: Request, body: NewPin, cache_admin: CacheAdmin) -> Chain | KeyedPrefix:
    """The prefix that the body names."""
    ways = [way for way in (body.key, body.prompt, body.messages) if way is not None]
    if len(ways) != 1:
        raise InvalidRequest("Say what to pin by one of `key`, `prompt` and `messages`.")
    if body.key is not None:
        return await whole_prefix(cache_admin, PrefixKey(bytes.fromhex(body.key)))
    if (body.tenant is None) == (body.group is None):
        raise InvalidRequest("Say whose prompt it is: `tenant` or `group`.")
    if body.tenant is not None:
        await must_exist(request, body.tenant)
    wire = wire_of(request)
    model = find_model(wire.inference.models, body.model or next(iter(wire.inference.models)))
    if body.messages is not None:
        chat = ChatBody.model_construct(
            model=model.name, messages=body.messages, add_generation_prompt=False
        )
        prompt = chat_prompt(wire, model, chat)
        encoded = await encode_chat(wire, model, prompt, tenant=OPERATOR)
    else:
        assert body.prompt is not None
        encoded = Encoded(await encode_prompt(wire, model, body.prompt, tenant=OPERATOR))
    salt = (
        wire.access.salts.of_tenant(body.tenant)
        if body.tenant is not None
        else wire.access.salts.group_salt(body.group or "")
    )
    root = replace(model.scope, tenant=salt).root()
    contents = block_contents(encoded.contents, cache_admin.block_size)
    return Chain(root, encoded.tokens, cache_admin.block_size, contents)
