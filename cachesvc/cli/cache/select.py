"""Selects blocks by key, scope and tenant; and finds the server that holds the folder."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from cachesvc.cli.render import fail
from cachesvc.operator.scopes import roots_of
from cachesvc.server.server_file import find_server
from tiers.blocks.keys import KEY_BYTES, PrefixKey
from tiers.disk.directory import is_locked, read_holder
from tiers.disk.inspection.view import BlockInfo, DiskView

Tenant = Annotated[str | None, typer.Option(help="Only blocks of this tenant or sharing group")]


def find_block(view: DiskView, start: str, *, missing_ok: bool) -> BlockInfo | None:
    """The one block whose key begins with `start`; ends the command if there are more, or none
    unless `missing_ok`."""
    found = [
        block for block in view.find(_whole_bytes(start)) if block.key.hex().startswith(_low(start))
    ]
    if missing_ok and not found:
        return None
    _exactly_one(len(found), f"block's key begins with {start}", "`cachesvc cache ls`")
    return found[0]


def find_scope(scopes: Iterable[PrefixKey], start: str) -> PrefixKey:
    """The one scope whose root begins with `start`; ends the command unless there is exactly
    one."""
    _whole_bytes(start)
    found = [root for root in scopes if root.hex().startswith(_low(start))]
    _exactly_one(len(found), f"scope's root begins with {start}", "`cachesvc cache tree`")
    return found[0]


def scope_filter(path: Path, tenant: str | None, start: str | None) -> Callable[[PrefixKey], bool]:
    """A test whether a scope is selected; ends the command for an unknown tenant.

    The running server knows the tenants. Without a server, a mistyped name has no blocks.
    """
    server = find_server(path) if tenant else None
    if server is not None:
        server.get("/admin/api/blocks", {"tenant": tenant, "limit": 1})
    roots = roots_of(path, tenant) if tenant is not None else None
    if roots is not None and not roots:
        fail(
            f"{path} does not know the scopes of its models yet; they are noted when a server "
            "starts on it. Until then, choose by --scope, as `cachesvc cache tree` prints them"
        )
    low = (start or "").lower()
    return lambda scope: (roots is None or scope in roots) and scope.hex().startswith(low)


def server_of(path: Path) -> str | None:
    """A description of the server that holds a disk tier's folder, if any."""
    return read_holder(path) if is_locked(path) else None


def _low(start: str) -> str:
    return start.strip().lower()


def _whole_bytes(start: str) -> bytes:
    text = _low(start)
    try:
        data = bytes.fromhex(text[: len(text) // 2 * 2])
        int(text, 16)
    except ValueError:
        data = b"\0" * (KEY_BYTES + 1)
    if len(text) > 2 * KEY_BYTES or len(data) > KEY_BYTES:
        fail(
            f"{start!r} is not a key; a key is written in hex, as `cachesvc cache ls` prints it", 2
        )
    return data


def _exactly_one(count: int, what: str, lister: str) -> None:
    if count == 0:
        fail(f"no {what}; {lister} lists them")
    if count > 1:
        fail(f"more than one {what} ({count} do); give more of it")
