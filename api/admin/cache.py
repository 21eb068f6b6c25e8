"""An admin's changes to the cache: the operations behind routes and pages.

`CacheAdmin` makes a change durable, on disk as well; then the audit entry is written. Event loop
only.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import Request

from api.access.shares import OPERATOR
from api.admin.parts import add_audit_entry, parts_of
from api.context import wire_of
from api.errors import InvalidRequest, RecordNotFound
from api.routes.prompts import encode_prompt, encoded_chat
from api.served_model import find_model
from api.shapes.message import Message
from api.shapes.schemas import ChatBody
from billing.operations.arguments import Argument, Name, Why
from billing.tenants import Tenant
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import KEY_BYTES, PrefixKey
from tiers.errors import TierError
from tiers.policy.retention import pin_json

Document = dict[str, Any]
OwnerKind = Literal["tenant", "group"]
Key = Annotated[str, Argument("Hex", pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
MAX_PIN_S: Final = 366 * 86_400


async def pins(request: Request) -> list[Document]:
    """Every pin in force."""
    return [pin_json(pin) for pin in await parts_of(request).cache.pins()]


async def pin(
    request: Request,
    *,
    name: Name,
    for_s: Annotated[float, Argument("How long it is kept, in seconds", gt=0, le=MAX_PIN_S)],
    key: Key | None = None,
    tenant: Annotated[Name | None, Argument("Whose prompt it is")] = None,
    group: Annotated[Name | None, Argument("Or which sharing group's")] = None,
    model: Annotated[str, Argument(max_length=200)] | None = None,
    prompt: str | list[int] | None = None,
    messages: list[Message] | None = None,
    by: str,
    why: Why,
) -> Document:
    """Pin a prefix, which keeps it in at least one tier. Replaces a pin of that name.

    The prefix is named by its last block's `key` or by the `prompt` or `messages` that begin with
    it.
    """
    if sum(way is not None for way in (key, prompt, messages)) != 1:
        raise InvalidRequest("Say what to pin by one of `key`, `prompt` and `messages`.")
    prefix: Chain | KeyedPrefix
    if key is not None:
        prefix = await parts_of(request).cache.prefix_of(PrefixKey(bytes.fromhex(key)))
        if not prefix.keys:
            raise RecordNotFound(f"no prefix ends with block {key}; see `cachesvc cache tree`")
    elif (tenant is None) == (group is None):
        raise InvalidRequest("Say whose prompt it is: `tenant` or `group`.")
    else:
        salts = wire_of(request).access.salts
        if tenant is not None:
            await must_exist(request, tenant)
        salt = salts.group_salt(group or "") if tenant is None else salts.of_tenant(tenant)
        prefix = await _prefix(request, salt, model, prompt, messages)
    try:
        made = await parts_of(request).cache.pin(name, prefix, time.time() + for_s, why)
    except TierError as error:  # too many blocks
        raise InvalidRequest(str(error)) from None
    after = {"scope": prefix.root.hex(), "num_tokens": made.num_tokens, "until_s": made.until_s}
    await add_audit_entry(request, by, "cache.pin", name, why=why, after=after)
    return pin_json(made)


async def unpin(request: Request, *, name: Name, by: str, why: Why) -> Document:
    """End a pin; its blocks may be evicted again."""
    if not await parts_of(request).cache.unpin(name):
        raise RecordNotFound(
            f"there is no pin {name[:64]!r}, or it has ended; GET /admin/api/cache/pins lists them"
        )
    await add_audit_entry(request, by, "cache.unpin", name, why=why)
    return {"name": name, "pinned": False}


async def evict(
    request: Request,
    *,
    keys: Annotated[Sequence[Key], Argument(min_length=1, max_length=10_000)] | None = None,
    below: Key | None = None,
    whole_run: bool = False,
    by: str,
    why: Why,
) -> Document:
    """Remove blocks from every tier, except those in use or pinned. Returns how many, by tier.

    They are `keys`, or the block `below` and all that continues it. `whole_run` adds the blocks
    before it, back to the last branch.
    """
    if (keys is None) == (below is None):
        raise InvalidRequest("Say what to evict by one of `keys` and `below`.")
    explorer = parts_of(request).explorer
    if keys is not None:
        found = [PrefixKey(bytes.fromhex(key)) for key in keys]
        subject = keys[0] if len(keys) == 1 else f"{len(keys)} blocks"
    else:
        subject = str(below)
        found = await explorer.below(PrefixKey(bytes.fromhex(subject)), whole_run=whole_run)
    removed = await parts_of(request).cache.evict(found)
    explorer.forget_disk()  # its snapshot is out of date
    await add_audit_entry(request, by, "cache.evict", subject, why=why, after=removed)
    return {"removed": removed}


async def purge(
    request: Request, *, kind: OwnerKind = "tenant", name: Name, by: str, why: Why
) -> Document:
    """Remove every block of a tenant or sharing group from every tier. Returns the signed
    receipt."""
    if kind == "tenant":
        await must_exist(request, name)
    signed = await parts_of(request).cache.purge(kind, name, by=by, why=why)
    parts_of(request).explorer.forget_disk()  # its snapshot is out of date
    await add_audit_entry(request, by, "cache.purge", name, why=why, after=signed)
    return signed


async def must_exist(request: Request, name: str, what: str = "tenant") -> Tenant:
    """The tenant. Raises RecordNotFound for an unknown one.

    A mistyped name must not end in a pin that serves nobody, in a receipt that proves nothing, or
    in a tree without blocks, which would look like a cold cache.
    """
    accounts = parts_of(request).books.accounts
    found = await asyncio.to_thread(accounts.find_tenant, name)
    if found is None:
        raise RecordNotFound(f"no {what} is named {name[:64]!r}; see `cachesvc tenants show`")
    return found


async def _prefix(
    request: Request,
    salt: bytes,
    model_name: str | None,
    text: str | list[int] | None,
    messages: list[Message] | None,
) -> Chain:
    """The prefix of a prompt or a chat, for the tenant or group with this salt."""
    wire, block_size = wire_of(request), parts_of(request).cache.block_size
    models = wire.inference.models
    model = find_model(models, model_name)
    if messages is not None:
        chat = ChatBody.model_construct(
            model=model.name, messages=messages, add_generation_prompt=False
        )
        tokens = await encoded_chat(wire, model, chat, tenant=OPERATOR)
    else:
        assert text is not None
        tokens = await encode_prompt(wire, model, text, tenant=OPERATOR)
    root = replace(model.scope, tenant=salt).root()
    return Chain(root, tokens, block_size)
