"""`cachesvc cache purge`: every block of a tenant or a sharing group, with a signed receipt."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from api.access.auth import Salts
from api.format import number_of, size
from api.requests.kept import owner_of
from billing.reports.receipts import ReceiptSigner
from cachesvc.cli.money.books import DatabaseUrl, books
from cachesvc.cli.options import DataDir, existing_data_dir
from cachesvc.cli.render import AsJson, answer, confirm, fail
from cachesvc.operator.purge import keep_receipt, purge_stopped, receipt, roots_to_purge
from cachesvc.operator.scopes import ScopeKind, salt_of
from cachesvc.operator.secret import read_secret
from cachesvc.server.kept_turns import forget_stored
from cachesvc.server.server_file import actor, find_server

PURGE_TIMEOUT_S = 600.0


def purge(
    tenant: Annotated[str | None, typer.Option(help="Every block of this tenant")] = None,
    group: Annotated[str | None, typer.Option(help="Every block of this sharing group")] = None,
    why: Annotated[
        str, typer.Option("--reason", help="Reason for the receipt and the audit trail")
    ] = "",
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    json: AsJson = False,
) -> None:
    """Remove every block of a tenant from every tier, with a signed receipt.

    If a server is running, it does the work; otherwise the command purges the disk.
    """
    path = existing_data_dir(data_dir)
    if bool(tenant) == bool(group):
        fail("say whose blocks: either --tenant or --group", 2)
    if not why.strip():
        fail("say why with --reason: the receipt and the admin trail keep it", 2)
    kind, name = (ScopeKind.TENANT, tenant) if tenant else (ScopeKind.GROUP, group)
    assert name is not None
    confirm(f"Purge every block of {kind} {name} from every tier?", yes=yes)
    signed = _purge_live(path, kind, name, why) or _purge_stopped(
        path, kind, name, why, database_url
    )
    answer(signed, json, *_lines(signed, kind, name))


def _purge_live(path: Path, kind: ScopeKind, name: str, why: str) -> Mapping[str, Any] | None:
    server = find_server(path)
    if server is None:
        return None
    body = {"kind": kind, "name": name, "why": why}
    signed: Mapping[str, Any] = server.post(
        "/admin/api/cache/purge", body, timeout_s=PURGE_TIMEOUT_S
    )
    return signed


def _purge_stopped(
    path: Path, kind: ScopeKind, name: str, why: str, database_url: str | None
) -> Mapping[str, Any]:
    by, started_s = actor(), time.time()
    roots = roots_to_purge(path, name, kind)
    if not roots:
        fail(f"no model was served from {path} yet, so {kind} {name} has no blocks there")
    with books(path, database_url) as open_books:
        if kind is ScopeKind.TENANT and open_books.accounts.find_tenant(name) is None:
            fail(f"no tenant is named {name!r}; see `cachesvc tenants show`")
        owner = owner_of(salt_of(Salts(read_secret(path)), name, kind))
        done = purge_stopped(path, roots)
        forget_stored(path, owner)
        signer = ReceiptSigner.open(path)
        signed = receipt(signer, kind, name, done, live=False, by=by, why=why, started_s=started_s)
        keep_receipt(path, signed)
        record = open_books.accounts.trail.record
        record("cache.purge", name, by=by, after=signed, reason=why)
    return signed


def _lines(signed: Mapping[str, Any], kind: str, name: str) -> Iterator[str]:
    whose = f"of {kind} {name} off"
    for tier, gone in signed["tiers"].items():
        yield f"{number_of(gone['blocks'], 'block')} ({size(gone['bytes'])}) {whose} {tier}"
    for tier, gone in signed.get("checkpoints", {}).items():
        yield f"{number_of(gone['count'], 'checkpoint')} ({size(gone['bytes'])}) {whose} {tier}"
    if in_use := signed["blocks_in_use"]:
        yield f"{in_use} of them are in use by running requests and go when these end"
    if away := signed.get("not_reached"):
        yield f"not reached is what the engines of {', '.join(away)} cache, till they need the room"
    yield (
        f"a look at every block found none left; receipt {signed['finished_ns']} is in "
        f"receipts/, signed with key {signed['key_id']}"
    )
