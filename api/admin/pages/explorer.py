"""The prefix explorer under /admin/explorer: all tiers as one tree, and one block, with
forms that pin, evict and purge.

Tokens are decoded only when an admin asks, and that leaves an audit entry.
"""

import asyncio
import time
from array import array
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from api.admin import cache
from api.admin.access import MayChange, MayRead
from api.admin.login.sessions import Admin, Role
from api.admin.pages.base import render
from api.admin.pages.filters import Filter
from api.admin.pages.prefix_rows import OUTLINE_TOKENS, ScopeRows, rows_of
from api.admin.parts import add_audit_entry, parts_of
from api.cache.explorer import Grown
from api.context import wire_of
from api.errors import InvalidRequest
from tiers.blocks.keys import KEY_BYTES, PrefixKey
from tiers.blocks.tree import Tree, TreeNode, TreeQuery, tree_json
from tiers.tier import TierName

router = APIRouter(tags=["admin: cache"])

# A page has at most 100 rows of about 900 bytes, and stays under 150 KB with its files.
PAGE = TreeQuery(depth=12, max_nodes=100, num_tokens=OUTLINE_TOKENS)


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
    if tenant and tenant not in wire_of(request).access.salts.groups:
        await cache.must_exist(request, tenant, "tenant or sharing group")
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
    parts = parts_of(request)
    return await parts.explorer.room(await parts.blocks())


@router.get("/admin/explorer", include_in_schema=False)
async def page(
    request: Request,
    admin: MayRead,
    q: Filter = "",
    tenant: Filter = "",
    below: Filter = "",
    sort: Filter = "",
) -> Response:
    """The tree, or the block that a search found."""
    explorer = parts_of(request).explorer
    found: list[PrefixKey] = []
    if q.strip():
        found = await explorer.find(_hex(q))
        if len(found) == 1:
            return RedirectResponse(f"/admin/explorer/{found[0].hex()}", 303)
    roots = (key_of(below),) if below else ()
    if explorer.has_blocks:
        grown, scopes = await _grown(request, admin, replace(PAGE, roots=roots), tenant, sort)
    else:
        named = await asyncio.to_thread(explorer.owners.by_root)
        grown, scopes = Grown(Tree([], 0, 0), named, cut=False), []
    return render(
        request,
        "explorer.html",
        admin,
        scopes=scopes,
        left_off=any(map(_leaves_off, grown.tree.roots)) or bool(tenant or below),
        names=sorted({owner.name for owner in grown.owners.values()}),
        owners=sorted({(owner.is_group, owner.name) for owner in grown.owners.values()}),
        num_blocks=grown.tree.num_blocks,
        num_seen=grown.tree.num_seen,
        cut=grown.cut,
        pins=await parts_of(request).cache.pins(),
        room=[] if q or below or not explorer.has_blocks else await owners(request, admin),
        elsewhere=not explorer.has_blocks,
        tiers=TierName,
        now_s=time.time(),
        q=q,
        found=found,
        tenant=tenant,
        below=below,
        sort=sort,
    )


@router.get("/admin/explorer/{key}", include_in_schema=False)
async def block_page(request: Request, key: str, admin: MayRead) -> Response:
    return await _show_block(request, admin, key_of(key))


@router.post("/admin/explorer/{key}/text", include_in_schema=False)
async def text_page(request: Request, key: str, admin: MayChange) -> Response:
    """A block's tokens as text. Leaves an audit entry."""
    detail, _ = await parts_of(request).explorer.block(key_of(key))
    await add_audit_entry(request, admin.name, "block.read", key)
    text = parts_of(request).decode(array("i", detail.block.tokens))
    return await _show_block(request, admin, key_of(key), text)


def key_of(text: str) -> PrefixKey:
    """A complete key, in hex."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"{text[:64]!r} is not a key; a key is {2 * KEY_BYTES} hex digits")
    return PrefixKey(key)


async def _show_block(
    request: Request, admin: Admin, key: PrefixKey, text: str | None = None
) -> Response:
    explorer = parts_of(request).explorer
    detail, owner = await explorer.block(key)
    below, scopes = await _grown(request, admin, replace(PAGE, roots=(key,)))
    return render(
        request,
        "block.html",
        admin,
        detail=detail,
        owner=owner,
        block_bytes=explorer.block_bytes,
        scopes=scopes,
        num_below=below.tree.num_seen,
        pins=[pin for pin in await parts_of(request).cache.pins() if key in pin.keys],
        now_s=time.time(),
        text=text,
    )


async def _grown(
    request: Request, admin: Admin, query: TreeQuery, tenant: str = "", sort: str = ""
) -> tuple[Grown, list[ScopeRows]]:
    """A tree and its rows. Prefixes' first words are for admins, if the server keeps prompts."""
    parts = parts_of(request)
    grown = await parts.explorer.tree(query, tenant)
    decode = parts.decode if parts.journal.settings.keep_prompts else None
    may_read = decode if admin.role is Role.ADMIN else None
    return grown, rows_of(parts, grown, sort=sort, decode=may_read)


def _hex(text: str) -> str:
    digits = text.strip().lower()
    if not digits or len(digits) > 2 * KEY_BYTES or set(digits) - set("0123456789abcdef"):
        raise InvalidRequest(f"{text[:64]!r} is not the beginning of a key; a key is hex digits")
    return digits


def _leaves_off(node: TreeNode) -> bool:
    """Whether the tree omits reachable blocks."""
    return node.left_off > 0 or any(map(_leaves_off, node.children))
