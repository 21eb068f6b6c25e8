"""Actions on the cache: pin, unpin, evict, purge.

Forms work without a script. Each asks for a reason and leaves an audit entry.
"""

import json
import time
from typing import Annotated, cast, get_args

from fastapi import APIRouter, Form, Request
from starlette.responses import RedirectResponse, Response

from api.admin import cache_changes
from api.admin.access import MayChange, MayRead
from api.admin.cache_changes import OwnerKind, whole_prefix
from api.admin.pages.explorer import key_of, show_block
from api.admin.pages.forms import Text, reason_in
from api.admin.parts import parts_of
from api.errors import ApiError, InvalidRequest, RecordNotFound

router = APIRouter(prefix="/admin", include_in_schema=False)

MAX_HOURS = 24 * 366


@router.post("/explorer/{key}/pin")
async def pin(
    request: Request,
    key: str,
    admin: MayChange,
    name: Text = "",
    hours: Annotated[str, Form(max_length=20)] = "24",
    why: Text = "",
) -> Response:
    """Keep the prefix that ends with this block."""
    try:
        reason, until_s = reason_in(why), time.time() + _hours(hours) * 3600
        wanted = name.strip() or f"pin-{key[:12]}"
        prefix = await whole_prefix(parts_of(request).cache, key_of(key))
        await cache_changes.pin(request, admin, wanted, prefix, until_s=until_s, why=reason)
    except ApiError as error:
        return await show_block(request, admin, key_of(key), wrong=str(error))
    return RedirectResponse(f"/admin/explorer/{key}?done=pinned", 303)


@router.post("/explorer-pins/{name}/end")
async def unpin(request: Request, name: str, admin: MayChange) -> Response:
    """End a pin by its name; the prefix may be evicted again."""
    await cache_changes.unpin(request, admin, name, "ended on the page of prefixes")
    return RedirectResponse("/admin/explorer?done=unpinned", 303)


@router.post("/explorer/{key}/evict")
async def evict(
    request: Request, key: str, admin: MayChange, what: Text = "run", why: Text = ""
) -> Response:
    """Remove the block (or the run that it ends) and all its continuations from every tier."""
    try:
        reason = reason_in(why)
        keys = await parts_of(request).explorer.below(key_of(key), whole_run=what == "run")
        removed = await cache_changes.evict(request, admin, keys, reason, subject=key)
    except ApiError as error:
        return await show_block(request, admin, key_of(key), wrong=str(error))
    done = "evicted" if any(removed.values()) else "kept"
    return RedirectResponse(f"/admin/explorer?done={done}", 303)


@router.post("/explorer-purge")
async def purge(
    request: Request, admin: MayChange, owner: Text = "", confirm: Text = "", why: Text = ""
) -> Response:
    """Remove every block of a tenant or group (`tenant:NAME`, `group:NAME`) from every tier."""
    kind, _, name = owner.partition(":")
    if kind not in get_args(OwnerKind) or not name or confirm.strip() != name:
        raise InvalidRequest(
            f"To purge, type the name '{name[:64]}' into the second field; it had "
            f"'{confirm[:64]}'. Nothing was removed."
        )
    wanted = cast(OwnerKind, kind)
    signed = await cache_changes.purge(request, admin, wanted, name, reason_in(why))
    return RedirectResponse(f"/admin/explorer?done=purged&receipt={signed['finished_ns']}", 303)


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


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours <= MAX_HOURS:
        raise InvalidRequest(f"'{text}' is not a number of hours from 0 to {MAX_HOURS}.")
    return hours
