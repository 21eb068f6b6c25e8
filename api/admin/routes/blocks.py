"""Blocks above the disk, and tokens as text: for `cachesvc cache ls|hot|show`."""

from dataclasses import replace
from heapq import nlargest
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from api.admin.access import MayRead
from api.admin.cache import must_be_known
from api.admin.parts import parts_of
from api.collaborators import Collaborators
from api.context import wire_of
from api.errors import InvalidRequest
from tiers.blocks.keys import PrefixKey, token_ids
from tiers.blocks.view import BlockView
from tiers.tier import TierName

router = APIRouter(prefix="/admin/api", tags=["admin"])

MAX_BLOCKS = 100_000


@router.get("/blocks")
async def blocks(
    request: Request,
    _: MayRead,
    tier: TierName | None = None,
    tenant: str | None = None,
    key: Annotated[str, Query(pattern="^[0-9a-f]{0,32}$")] = "",
    idle_s: Annotated[float, Query(ge=0)] = 0.0,
    limit: Annotated[int, Query(ge=1, le=MAX_BLOCKS)] = 100,
    tokens: bool = False,
) -> dict[str, Any]:
    """Full blocks in device and host memory, most hits first.

    `tenant` is a tenant or a sharing group. `key` is the beginning of a key, `idle_s` the minimum
    time since last use; `tokens` adds token ids.
    """
    if tenant:
        await must_be_known(request, tenant)
    found = await parts_of(request).blocks(_scopes_of(wire_of(request), tenant) if tenant else None)
    wanted = [
        block
        for block in found
        if block.key is not None
        and (tier is None or tier in block.tiers)
        and block.idle_s >= idle_s
        and _hex(block.key).startswith(key)
    ]
    shown = nlargest(limit, wanted, key=lambda block: (block.hits, -block.idle_s))
    return {
        "num_blocks": len(wanted),
        "blocks": [block_json(block, tokens=tokens) for block in shown],
    }


def _scopes_of(wire: Collaborators, name: str) -> frozenset[PrefixKey]:
    """The roots of the tenant and of the sharing group with this name."""
    salts = (wire.access.salts.of_tenant(name), wire.access.salts.group_salt(name))
    return frozenset(
        replace(model.scope, tenant=salt).root()
        for model in wire.inference.models.values()
        for salt in salts
    )


class Tokens(BaseModel):
    """Token ids to read as text."""

    token_ids: Annotated[list[int], Field(max_length=65_536)]


@router.post("/detokenize")
async def detokenize(request: Request, body: Tokens, _: MayRead) -> dict[str, str]:
    """The text of these tokens, by the served model's tokenizer."""
    tokenizer = next(iter(wire_of(request).inference.models.values())).tokenizer
    if any(not 0 <= token < tokenizer.vocab_size for token in body.token_ids):
        raise InvalidRequest(
            f"Token ids run from 0 to {tokenizer.vocab_size - 1} here.", param="token_ids"
        )
    return {"text": tokenizer.decode(body.token_ids)}


def block_json(block: BlockView, *, tokens: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "key": _hex(block.key),
        "parent": _hex(block.parent),
        "scope": _hex(block.scope),
        "tiers": list(block.tiers),
        "num_tokens": len(block.tokens) // 4,
        "depth": block.depth,
        "hits": block.hits,
        "pins": block.pins,
        "idle_s": round(block.idle_s, 3),
        "age_s": round(block.age_s, 3),
    }
    return fields | ({"token_ids": token_ids(block.tokens)} if tokens else {})


def _hex(key: PrefixKey | None) -> str:
    return key.hex() if key is not None else ""
