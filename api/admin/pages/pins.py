"""Actions on the cache: pin, unpin, evict, purge.

Forms work without a script. Each asks for a reason and leaves an audit entry.
"""

import json

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from api.admin import cache
from api.admin.access import MayChange, MayRead
from api.admin.pages.explorer import key_of, show_block
from api.admin.pages.operation_forms import FORMS, Sent
from api.admin.parts import parts_of
from api.errors import ApiError, InvalidRequest, RecordNotFound

router = APIRouter(prefix="/admin", include_in_schema=False)


@router.post("/explorer/{key}/pin")
async def pin(request: Request, key: str, admin: MayChange, sent: Sent) -> Response:
    """Keep the prefix that ends with this block."""
    try:
        given = FORMS["pin"].given(sent, key=key_of(key).hex(), name=f"pin-{key[:12]}")
        await cache.pin(request, **given, by=admin.name)
    except ApiError as error:
        return await show_block(request, admin, key_of(key), wrong=str(error))
    return RedirectResponse(f"/admin/explorer/{key}?done=pin", 303)


@router.post("/explorer-pins/{name}/end")
async def unpin(request: Request, name: str, admin: MayChange) -> Response:
    """End a pin by its name; the prefix may be evicted again."""
    await cache.unpin(request, name=name, by=admin.name, why="ended on the page of prefixes")
    return RedirectResponse("/admin/explorer?done=unpin", 303)


@router.post("/explorer/{key}/evict")
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


@router.post("/explorer-purge")
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


@router.get("/explorer-receipts/{finished_ns}.json")
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
