"""The prefix explorer under /admin/explorer: all tiers as one tree, and one block; pins, evictions
and purges.

Forms work without a script. Each asks for a reason and leaves an audit entry. Tokens are decoded
only when an admin asks, and that leaves an audit entry too.
"""

import asyncio
import json
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
from api.admin.pages.operation_forms import DONE, FORMS, Sent
from api.admin.pages.prefix_rows import OUTLINE_TOKENS, ScopeRows, rows_of
from api.admin.parts import add_audit_entry, parts_of
from api.cache.explorer import Grown, Room
from api.errors import ApiError, InvalidRequest, RecordNotFound
from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import Tree, TreeNode, TreeQuery, tree_json
from tiers.tier import TierName

router = APIRouter(tags=["admin: cache"])

KEY_BYTES = 16
# A page has at most 100 rows of about 900 bytes, and stays under 150 KB with its files.
PAGE = TreeQuery(depth=12, max_nodes=100, num_tokens=OUTLINE_TOKENS)
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
        await cache.must_be_known(request, tenant)
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
    return await parts.explorer.room(await parts.blocks())


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
    if explorer.has_blocks:
        grown, scopes = await _grown(request, admin, replace(PAGE, roots=roots), tenant, idle, sort)
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
        room=[] if q or below or not explorer.has_blocks else await room_of(request),
        elsewhere=not explorer.has_blocks,
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


@router.post("/admin/explorer/{key}/pin", include_in_schema=False)
async def pin(request: Request, key: str, admin: MayChange, sent: Sent) -> Response:
    """Keep the prefix that ends with this block."""
    try:
        given = FORMS["pin"].given(sent, key=key_of(key).hex(), name=f"pin-{key[:12]}")
        await cache.pin(request, **given, by=admin.name)
    except ApiError as error:
        return await show_block(request, admin, key_of(key), wrong=str(error))
    return RedirectResponse(f"/admin/explorer/{key}?done=pin", 303)


@router.post("/admin/explorer-pins/{name}/end", include_in_schema=False)
async def unpin(request: Request, name: str, admin: MayChange) -> Response:
    """End a pin by its name; the prefix may be evicted again."""
    await cache.unpin(request, name=name, by=admin.name, why="ended on the page of prefixes")
    return RedirectResponse("/admin/explorer?done=unpin", 303)


@router.post("/admin/explorer/{key}/evict", include_in_schema=False)
async def evict(request: Request, key: str, admin: MayChange, sent: Sent) -> Response:
    """Remove the block (or the run that it ends) and all its continuations from every tier."""
    try:
        given = FORMS["evict"].given(sent)
        whole_run = sent.get("what", "run") == "run"
        keys = await parts_of(request).explorer.below(key_of(key), whole_run=whole_run)
        removed = await cache.evict_blocks(request, keys, key, **given, by=admin.name)
    except ApiError as error:
        return await show_block(request, admin, key_of(key), wrong=str(error))
    done = "evict" if any(removed.values()) else "kept"
    return RedirectResponse(f"/admin/explorer?done={done}", 303)


@router.post("/admin/explorer-purge", include_in_schema=False)
async def purge(request: Request, admin: MayChange, sent: Sent) -> Response:
    """Remove every block of a tenant or group (`tenant:NAME`, `group:NAME`) from every tier."""
    kind, _, name = str(sent.get("owner", "")).partition(":")
    confirm = str(sent.get("confirm", ""))
    if kind not in ("tenant", "group") or not name or confirm.strip() != name:
        raise InvalidRequest(
            f"To purge, type the name '{name[:64]}' into the second field; it had "
            f"'{confirm[:64]}'. Nothing was removed."
        )
    given = FORMS["purge"].given(sent, kind=kind, name=name)
    signed = await cache.purge(request, **given, by=admin.name)
    return RedirectResponse(f"/admin/explorer?done=purge&receipt={signed['finished_ns']}", 303)


@router.get("/admin/explorer-receipts/{finished_ns}.json", include_in_schema=False)
async def receipt(request: Request, finished_ns: int, _: MayRead) -> Response:
    """The signed receipt of a purge, as a file to download."""
    signed = await parts_of(request).cache.receipt(finished_ns)
    if signed is None:
        raise RecordNotFound(f"No purge that ended at {finished_ns} has a receipt here.")
    name = f"purge-{finished_ns}.json"
    return Response(
        json.dumps(signed, indent=1) + "\n",
        media_type="application/json",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


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
        forms=FORMS,
        wrong=wrong,
        done=done,
    )


async def _grown(
    request: Request,
    admin: Admin,
    query: TreeQuery,
    tenant: str = "",
    idle: str = "",
    sort: str = "",
) -> tuple[Grown, list[ScopeRows]]:
    """A tree and its rows. Prefixes' first words are for admins, if the server keeps prompts."""
    parts = parts_of(request)
    grown = await parts.explorer.tree(query, tenant)
    decode = parts.decode if parts.journal.settings.keep_prompts else None
    return grown, rows_of(
        parts,
        grown,
        min_idle_s=IDLE.get(idle, 0),
        sort=sort,
        decode=decode if admin.role is Role.ADMIN else None,
    )


def _hex(text: str) -> str:
    digits = text.strip().lower()
    if not digits or len(digits) > 2 * KEY_BYTES or set(digits) - set("0123456789abcdef"):
        raise InvalidRequest(f"{text[:64]!r} is not the beginning of a key; a key is hex digits")
    return digits


def _leaves_off(node: TreeNode) -> bool:
    """Whether the tree omits reachable blocks."""
    return node.left_off > 0 or any(map(_leaves_off, node.children))
