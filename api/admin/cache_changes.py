"""An admin's changes to the cache: the one path behind pages and JSON.

`CacheAdmin` makes the change durable; then the audit entry is written. Event loop only.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import Request

from api.admin.login.sessions import Admin
from api.admin.parts import CacheAdmin, add_audit_entry, parts_of
from api.context import wire_of
from api.errors import InvalidRequest, RecordNotFound
from billing.tenants import Tenant
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import PrefixKey
from tiers.errors import TierError
from tiers.policy.retention import Pin

OwnerKind = Literal["tenant", "group"]


async def whole_prefix(cache_admin: CacheAdmin, key: PrefixKey) -> KeyedPrefix:
    """The prefix that ends with block `key`. Raises RecordNotFound."""
    prefix = await cache_admin.prefix_of(key)
    if not prefix.keys:
        raise RecordNotFound(
            f"no whole prefix ends with block {key.hex()}; see `cachesvc cache ls`"
        )
    return prefix


async def must_exist(request: Request, tenant: str) -> Tenant:
    """The tenant. Raises RecordNotFound for an unknown one.

    A mistyped name must not end in a pin that serves nobody or a receipt that proves nothing.
    """
    books = parts_of(request).books
    found = await asyncio.to_thread(books.accounts.find_tenant, tenant)
    if found is None:
        raise RecordNotFound(f"no tenant is named {tenant!r}; see `cachesvc tenants show`")
    return found


async def must_be_known(request: Request, name: str) -> None:
    """Raises RecordNotFound for a name that is neither a tenant nor a sharing group.

    A mistyped name has no blocks, which would look like a cold cache.
    """
    books = parts_of(request).books
    if name in wire_of(request).access.salts.groups:
        return
    if await asyncio.to_thread(books.accounts.find_tenant, name) is None:
        raise RecordNotFound(
            f"no tenant or sharing group is named {name[:64]!r}; see `cachesvc tenants show`"
        )


async def pin(
    request: Request,
    by: Admin,
    name: str,
    prefix: Chain | KeyedPrefix,
    *,
    until_s: float,
    why: str,
) -> Pin[PrefixKey]:
    """Pin a prefix until a moment (Unix seconds), replacing a pin of that name.

    Raises InvalidRequest if the tiers refuse it: too many blocks, or a moment in the past.
    """
    try:
        made = await parts_of(request).cache.pin(name, prefix, until_s, why)
    except TierError as error:
        raise InvalidRequest(str(error)) from None
    after = {"scope": prefix.root.hex(), "num_tokens": made.num_tokens, "until_s": made.until_s}
    await add_audit_entry(request, by.name, "cache.pin", name, why=why, after=after)
    return made


async def unpin(request: Request, by: Admin, name: str, why: str) -> None:
    """End a pin. Raises RecordNotFound if there is none of that name."""
    if not await parts_of(request).cache.unpin(name):
        raise RecordNotFound(
            f"there is no pin {name[:64]!r}, or it has ended; `cachesvc cache pin` lists them"
        )
    await add_audit_entry(request, by.name, "cache.unpin", name, why=why)


async def evict(
    request: Request, by: Admin, keys: Sequence[PrefixKey], why: str, *, subject: str = ""
) -> Mapping[str, int]:
    """Remove blocks from every tier, except those in use or pinned. Returns the number removed by
    tier.

    `subject` is what the audit entry calls them.
    """
    removed = await parts_of(request).cache.evict(keys)
    parts_of(request).explorer.forget_disk()  # its snapshot is out of date
    named = subject or (keys[0].hex() if len(keys) == 1 else f"{len(keys)} blocks")
    await add_audit_entry(request, by.name, "cache.evict", named, why=why, after=removed)
    return removed


async def purge(
    request: Request, by: Admin, kind: OwnerKind, name: str, why: str
) -> dict[str, Any]:
    """Remove every block of a tenant or group from every tier. Returns the signed receipt.

    Raises RecordNotFound for an unknown tenant.
    """
    if kind == "tenant":
        await must_exist(request, name)
    signed = await parts_of(request).cache.purge(kind, name, by=by.name, why=why)
    parts_of(request).explorer.forget_disk()  # its snapshot is out of date
    await add_audit_entry(request, by.name, "cache.purge", name, why=why, after=signed)
    return signed
