"""What `cachesvc cache ls|show` and `cachesvc explain` ask: blocks above the disk, tokens as
text, what a request would hit, and where two prompts diverge.

The command line has a request in a file and asks before sending it. Quotes and divergences are for
admins only: if the journal keeps prompts, these routes can show any tenant's.
"""

import asyncio
import json
from array import array
from heapq import nlargest
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from api.access.shares import OPERATOR
from api.admin.access import MayChange, MayRead
from api.admin.cache import must_be_known, must_exist
from api.admin.parts import parts_of
from api.admin.routes.derived import Name, StrictBody
from api.context import Arrival, request_log_of, wire_of
from api.errors import InvalidRequest, RecordNotFound
from api.job import Job
from api.requests.turns import common_length
from api.routes.quote import quoted_job
from api.shapes.body import parse
from api.shapes.schemas import QuoteBody
from billing.keys import Principal
from tiers.blocks.keys import PrefixKey, token_ids
from tiers.blocks.view import BlockView
from tiers.tier import TierName

router = APIRouter(prefix="/admin/api")

MAX_BLOCKS = 100_000
AROUND = 12  # tokens shown on either side of a divergence


@router.get("/blocks", tags=["admin"])
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
    parts, roots = parts_of(request), None
    if tenant:
        await must_be_known(request, tenant)
        roots = await asyncio.to_thread(parts.explorer.owners.roots_of, tenant)
    found = await parts.blocks(frozenset(roots) if roots is not None else None)
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


class Tokens(BaseModel):
    """Token ids to read as text."""

    token_ids: Annotated[list[int], Field(max_length=65_536)]


@router.post("/detokenize", tags=["admin"])
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


class ExplainedPrompt(StrictBody):
    """A request's body as it would be sent, and its tenant."""

    tenant: Name
    request: dict[str, Any]


class Pair(StrictBody):
    """Two bodies, or ids of two requests whose prompts the journal keeps."""

    tenant: Name
    a: dict[str, Any] | str
    b: dict[str, Any] | str


@router.post("/cache/quote", tags=["admin: cache"])
async def quote(request: Request, body: ExplainedPrompt, _: MayChange) -> dict[str, Any]:
    """Like POST /v1/cache/quote, for any tenant, by the card in its own currency."""
    tenant = await must_exist(request, body.tenant)
    principal = Principal(body.tenant, currency=tenant.currency)
    job = await _job(request, principal, body.request)
    quotes = wire_of(request).inference.engine_of(job.model).quotes
    return (await quotes.of(principal, job)).as_json()


@router.post("/cache/diff", tags=["admin: cache"])
async def diff(request: Request, body: Pair, _: MayChange) -> dict[str, Any]:
    """The first token at which two prompts diverge, and the text around it."""
    one, other = (
        await _tokens(request, body.tenant, body.a),
        await _tokens(request, body.tenant, body.b),
    )
    at = common_length(one, other)
    decode = parts_of(request).decode
    return {
        "same": at == len(one) == len(other),
        "at_token": at,
        "tokens": [len(one), len(other)],
        "before": decode(one[max(0, at - AROUND) : at]),
        "after": [decode(side[at : at + AROUND]) for side in (one, other)],
    }


async def _job(request: Request, principal: Principal, asked: dict[str, Any]) -> Job:
    raw = json.dumps(asked).encode()
    return await quoted_job(
        Arrival(request, wire_of(request), request_log_of(request), principal, raw),
        parse(raw, QuoteBody),
    )


async def _tokens(request: Request, tenant: str, asked: dict[str, Any] | str) -> "array[int]":
    if isinstance(asked, dict):
        job = await _job(request, Principal(tenant or OPERATOR), asked)
        return job.prompts[0]
    record = parts_of(request).journal.find(asked)
    if record is None:
        raise RecordNotFound(f"the server remembers no request {asked[:64]!r}")
    if not record.prompts:
        raise InvalidRequest(
            f"the prompt of {asked[:64]!r} was not stored; set journal.keep_prompts, or give "
            "its body"
        )
    return record.prompts[0]
