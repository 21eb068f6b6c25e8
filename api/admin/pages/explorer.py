"""The prefix explorer under /admin/explorer: all tiers as one tree, and one block.

Actions are in `api.admin.pages.pins`. Tokens are decoded only when an admin asks, and that leaves
an audit entry.
"""

import time
from array import array
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from api.admin.access import MayChange, MayRead
from api.admin.cache import must_be_known
from api.admin.login.sessions import Admin, Role
from api.admin.pages.base import render
from api.admin.pages.filters import Filter
from api.admin.pages.operation_forms import DONE, FORMS
from api.admin.pages.prefix_rows import OUTLINE_TOKENS, Costs, Decode, rows_of
from api.admin.parts import add_audit_entry, parts_of
from api.cache.explorer import Room
from api.errors import InvalidRequest
from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import TreeNode, TreeQuery, tree_json
from tiers.tier import TierName

router = APIRouter(tags=["admin: cache"])

KEY_BYTES = 16
DEPTH = 12
MAX_ROWS = 100  # of a page, about 900 bytes each; a page stays under 150 KB with its files
IDLE = {"": 0, "1m": 60, "1h": 3600, "1d": 86_400, "7d": 7 * 86_400}
KEPT = "Nothing was evicted: running requests or pins hold all of it."


@router.get("/admin/api/cache/tree")
async def tree(
    request: Request,
    _: MayRead,
    tenant: Filter = "",
    below: Filter = "",
    depth: Annotated[int, Query(ge=1, le=64)] = 8,
) -> dict[str, Any]:
    """The prefixes of all tiers as a tree: of one tenant, or below one block if `below` is its
    key."""
    if tenant:
        await must_be_known(request, tenant)
    roots = (key_of(below),) if below else ()
    grown = await parts_of(request).explorer.tree(TreeQuery(roots=roots, depth=depth), tenant)
    payload = tree_json(grown.tree)
    for scope, root in zip(payload["scopes"], grown.tree.roots, strict=True):
        owner = grown.owners.get(root.last) if root.last is not None else None
        scope["owner"] = owner.label if owner is not None else None
        scope["model"] = owner.model if owner is not None else None
    return payload | {"cut": grown.cut}


@router.get("/admin/api/cache/owners")
async def owners(request: Request, _: MayRead) -> list[dict[str, Any]]:
    """Bytes of each tenant and sharing group in each tier, largest first."""
    return [
        {"owner": each.owner, "model": each.model, "bytes": dict(each.num_bytes)}
        for each in await room_of(request)
    ]


async def room_of(request: Request) -> list[Room]:
    """Bytes of each owner in each tier."""
    parts = parts_of(request)
    return await parts.explorer.room(await parts.blocks(None))


@router.get("/admin/explorer", include_in_schema=False)
async def page(
    request: Request,
    admin: MayRead,
    q: Filter = "",
    tenant: Filter = "",
    below: Filter = "",
    idle: Filter = "",
    sort: Filter = "",
    done: Filter = "",
    receipt: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """The tree, or the block that a search found."""
    explorer = parts_of(request).explorer
    found: list[PrefixKey] = []
    if q.strip():
        found = await explorer.find(_hex(q))
        if len(found) == 1:
            return RedirectResponse(f"/admin/explorer/{found[0].hex()}", 303)
    roots = (key_of(below),) if below else ()
    query = TreeQuery(roots=roots, depth=DEPTH, max_nodes=MAX_ROWS, num_tokens=OUTLINE_TOKENS)
    grown = await explorer.tree(query, tenant)
    costs = Costs.of(parts_of(request), explorer.block_bytes)
    return render(
        request,
        "explorer.html",
        admin,
        scopes=rows_of(
            grown,
            costs,
            min_idle_s=IDLE.get(idle, 0),
            sort=sort,
            decode=labels_for(request, admin),
            outline=parts_of(request).outline,
        ),
        left_off=any(map(_leaves_off, grown.tree.roots)) or bool(tenant or below),
        names=sorted({owner.name for owner in grown.owners.values()}),
        owners=sorted({(owner.is_group, owner.name) for owner in grown.owners.values()}),
        num_blocks=grown.tree.num_blocks,
        num_seen=grown.tree.num_seen,
        cut=grown.cut,
        pins=await parts_of(request).cache.pins(),
        room=[] if q or below else await room_of(request),
        tiers=TierName,
        now_s=time.time(),
        q=q,
        found=found,
        tenant=tenant,
        below=below,
        idle=idle,
        sort=sort,
        choices=IDLE,
        done=KEPT if done == "kept" else DONE.get(done, ""),
        forms=FORMS,
        receipt=receipt,
    )


@router.get("/admin/explorer/{key}", include_in_schema=False)
async def block_page(request: Request, key: str, admin: MayRead, done: Filter = "") -> Response:
    return await show_block(request, admin, key_of(key), done=DONE.get(done, ""))


@router.post("/admin/explorer/{key}/text", include_in_schema=False)
async def text_page(request: Request, key: str, admin: MayChange) -> Response:
    """A block's tokens as text. Leaves an audit entry."""
    detail, _ = await parts_of(request).explorer.block(key_of(key))
    await add_audit_entry(request, admin.name, "block.read", key)
    text = parts_of(request).decode(array("i", detail.block.tokens))
    return await show_block(request, admin, key_of(key), text=text)


def key_of(text: str) -> PrefixKey:
    """A complete key, in hex."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"{text[:64]!r} is not a key; a key is {2 * KEY_BYTES} hex digits")
    return PrefixKey(key)


async def show_block(
    request: Request,
    admin: Admin,
    key: PrefixKey,
    *,
    text: str | None = None,
    wrong: str = "",
    done: str = "",
) -> Response:
    explorer, parts = parts_of(request).explorer, parts_of(request)
    detail, owner = await explorer.block(key)
    query = TreeQuery(roots=(key,), depth=DEPTH, max_nodes=MAX_ROWS, num_tokens=OUTLINE_TOKENS)
    below = await explorer.tree(query)
    costs = Costs.of(parts, explorer.block_bytes)
    return render(
        request,
        "block.html",
        admin,
        detail=detail,
        owner=owner,
        block_bytes=explorer.block_bytes,
        scopes=rows_of(below, costs, decode=labels_for(request, admin), outline=parts.outline),
        num_below=below.tree.num_seen,
        pins=[pin for pin in await parts_of(request).cache.pins() if key in pin.keys],
        now_s=time.time(),
        text=text,
        forms=FORMS,
        wrong=wrong,
        done=done,
    )


def labels_for(request: Request, admin: Admin) -> Decode | None:
    """The decoder of prefixes' first words: for admins, if the server keeps prompts."""
    parts = parts_of(request)
    kept = parts.journal.settings.keep_prompts
    return parts.decode if kept and admin.role is Role.ADMIN else None


def _hex(text: str) -> str:
    digits = text.strip().lower()
    if not digits or len(digits) > 2 * KEY_BYTES or set(digits) - set("0123456789abcdef"):
        raise InvalidRequest(f"{text[:64]!r} is not the beginning of a key; a key is hex digits")
    return digits


def _leaves_off(node: TreeNode) -> bool:
    """Whether the tree omits reachable blocks."""
    return node.left_off > 0 or any(map(_leaves_off, node.children))
