"""What an admin does to the cache from its pages: pin, unpin, evict, purge.

Forms that need no script. Every one asks for a reason and leaves an audit entry.
"""

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Form, Request
from starlette.responses import RedirectResponse, Response

from api.admin.access import MayChange
from api.admin.pages_explorer import key_of, show_block
from api.admin.parts import parts_of
from api.admin.sessions import Admin
from api.errors import ApiError, InvalidRequest, Unsupported
from api.keeping import Keeping

router = APIRouter(prefix="/admin", include_in_schema=False)

MAX_HOURS = 24 * 366
Text = Annotated[str, Form(max_length=500)]


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
        reason, until_s = _why(why), time.time() + _hours(hours) * 3600
        wanted = name.strip() or f"pin-{key[:12]}"
        made = await keeping_of(request).pin(wanted, key_of(key), until_s, reason)
    except ApiError as error:
        return await show_block(request, admin, key_of(key), wrong=str(error))
    after = {"name": made.name, "blocks": len(made.keys), "until_s": round(until_s)}
    await _audit(request, admin, "cache.pin", key, reason, after)
    return RedirectResponse(f"/admin/explorer/{key}?done=pinned", 303)


@router.post("/explorer-pins/{name}/end")
async def unpin(request: Request, name: str, admin: MayChange) -> Response:
    """End a pin by its name; the prefix may be evicted again."""
    if not await keeping_of(request).unpin(name):
        raise InvalidRequest(f"There is no pin '{name[:64]}'; it may have ended meanwhile.")
    await _audit(request, admin, "cache.unpin", name, "ended on the page of prefixes")
    return RedirectResponse("/admin/explorer?done=unpinned", 303)


@router.post("/explorer/{key}/evict")
async def evict(
    request: Request, key: str, admin: MayChange, what: Text = "run", why: Text = ""
) -> Response:
    """Remove the block, or the run that it ends, and all that continues it, from every tier."""
    try:
        reason = _why(why)
        removed = await keeping_of(request).evict(key_of(key), whole_run=what == "run")
    except ApiError as error:
        return await show_block(request, admin, key_of(key), wrong=str(error))
    after = {str(tier): blocks for tier, blocks in removed.items()}
    await _audit(request, admin, "cache.evict", key, reason, after)
    done = "evicted" if any(removed.values()) else "kept"
    return RedirectResponse(f"/admin/explorer?done={done}", 303)


@router.post("/explorer-purge")
async def purge(
    request: Request, admin: MayChange, tenant: Text = "", confirm: Text = "", why: Text = ""
) -> Response:
    """Remove every block of a tenant or group, in all models, from every tier."""
    if not tenant or confirm.strip() != tenant:
        raise InvalidRequest(
            f"To purge, type the name '{tenant[:64]}' into the second field; it had "
            f"'{confirm[:64]}'. Nothing was removed."
        )
    reason = _why(why)
    after = await keeping_of(request).purge(tenant)
    await _audit(request, admin, "cache.purge", tenant, reason, after)
    return RedirectResponse("/admin/explorer?done=purged", 303)


def keeping_of(request: Request) -> Keeping:
    """Raises Unsupported where the server has no cache that can be changed."""
    keeping = parts_of(request).keeping
    if keeping is None:
        raise Unsupported("This server has no cache that can be changed.")
    return keeping


def _why(why: str) -> str:
    if not why.strip():
        raise InvalidRequest("Say why; the audit log keeps it. Nothing was changed.")
    return why.strip()


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours <= MAX_HOURS:
        raise InvalidRequest(f"'{text}' is no number of hours from 0 to {MAX_HOURS}.")
    return hours


async def _audit(
    request: Request, admin: Admin, action: str, subject: str, why: str, after: Any = None
) -> None:
    record = parts_of(request).record
    await asyncio.to_thread(record, action, subject, by=admin.name, after=after, reason=why)
