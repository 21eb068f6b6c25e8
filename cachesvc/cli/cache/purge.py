"""`cachesvc cache purge`: every block of a tenant, a sharing group or a scope, with a receipt."""

import time
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import typer

from api.access.auth import Salts
from api.format import number_of, size
from api.requests.kept import owner_of
from billing.reports.receipts import ReceiptSigner
from billing.store.opening import database_url as ledger_url
from cachesvc.cli.cache.select import find_scope, server_of
from cachesvc.cli.money.books import DatabaseUrl, books
from cachesvc.cli.options import DataDir, existing_data_dir
from cachesvc.cli.render import AsJson, answer, confirm, fail, note, progress
from cachesvc.config.places import default_database_url, found_disk
from cachesvc.operator.purge import Order, keep_receipt, purge_stopped, receipt, roots_to_purge
from cachesvc.operator.scopes import ScopeKind, salt_of
from cachesvc.operator.secret import read_secret
from cachesvc.server.kept_turns import forget_stored
from cachesvc.server.server_file import actor, find_server
from tiers.blocks.keys import PrefixKey
from tiers.disk.inspection.maintenance import purge as purge_shards
from tiers.disk.inspection.opening import open_shards
from tiers.tier import Removed

PURGE_TIMEOUT_S = 600.0


def purge(
    tenant: Annotated[str | None, typer.Option(help="Every block of this tenant")] = None,
    group: Annotated[str | None, typer.Option(help="Every block of this sharing group")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="Root of a scope, or its first digits (hex); from disk only"),
    ] = None,
    why: Annotated[
        str, typer.Option("--reason", help="Reason for the receipt and the audit trail")
    ] = "",
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    json: AsJson = False,
) -> None:
    """Remove every block of a tenant from every tier, with a signed receipt.

    If a server is running, it does the work; otherwise the command purges the disk. --scope purges
    the disk only, and gives no receipt while a server is running.
    """
    path = existing_data_dir(data_dir)
    asked = [given for given in (tenant, group, scope) if given]
    if len(asked) != 1:
        fail("say whose blocks: one of --tenant, --group and --scope", 2)
    if not why.strip():
        fail("say why with --reason: the receipt and the admin trail keep it", 2)
    if scope:
        _purge_scopes(path, scope, why, database_url, yes=yes, json=json)
        return
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
        holder = server_of(found_disk(path))
        if holder is not None:
            fail(f"{path} is held by {holder}, which does not answer; stop it and try again")
        return None
    body = {"kind": kind, "name": name, "why": why}
    signed: Mapping[str, Any] = server.post(
        "/admin/api/cache/purge", body, timeout_s=PURGE_TIMEOUT_S
    )
    return signed


def _purge_stopped(
    path: Path, kind: ScopeKind, name: str, why: str, database_url: str | None
) -> Mapping[str, Any]:
    order = Order(kind=kind, name=name, by=actor(), why=why, started_s=time.time())
    roots = roots_to_purge(path, name, kind)
    if not roots:
        fail(f"no model was served from {path} yet, so {kind} {name} has no blocks there")
    with books(path, database_url) as open_books:
        if kind is ScopeKind.TENANT and open_books.accounts.find_tenant(name) is None:
            fail(f"no tenant is named {name!r}; see `cachesvc tenants show`")
        owner = owner_of(salt_of(Salts(read_secret(path)), name, kind))
        signed = _purge_disk(path, order, roots, owner)
        record = open_books.accounts.trail.record
        record("cache.purge", name, by=order.by, after=signed, reason=why)
    return signed


def _purge_disk(
    path: Path, order: Order, roots: Collection[PrefixKey], owner: bytes | None = None
) -> Mapping[str, Any]:
    """Purges the disk of a stopped server, and the turns and responses of an `owner`. Returns the
    receipt, which is also stored there."""
    done = purge_stopped(path, roots)
    if owner is not None:
        forget_stored(path, owner)
    signed = receipt(ReceiptSigner.open(path), order, done)
    keep_receipt(path, signed)
    return signed


def _lines(signed: Mapping[str, Any], kind: str, name: str) -> Iterator[str]:
    whose = f"of {kind} {name} off"
    for tier, gone in signed["tiers"].items():
        yield f"{number_of(gone['blocks'], 'block')} ({size(gone['bytes'])}) {whose} {tier}"
    for tier, gone in signed.get("checkpoints", {}).items():
        yield f"{number_of(gone['count'], 'checkpoint')} ({size(gone['bytes'])}) {whose} {tier}"
    if in_use := signed["blocks_in_use"]:
        yield f"{in_use} of them are in use by running requests and go when these end"
    yield (
        f"a look at every block found none left; receipt {signed['finished_ns']} is in "
        f"receipts/, signed with key {signed['key_id']}"
    )


def _purge_scopes(
    path: Path, starts: list[str], why: str, database_url: str | None, *, yes: bool, json: bool
) -> None:
    folder = found_disk(path)
    roots, total = _chosen(folder, starts)
    names = ", ".join(sorted(root.hex() for root in roots))
    blocks = f"{number_of(total.num_blocks, 'block')} ({size(total.stored_bytes)})"
    confirm(f"Purge {blocks} of {names} from {folder}?", yes=yes)
    server = server_of(folder)
    if server is not None:
        _purge_beside(folder, roots, server, json=json)
        return
    order = Order(kind="scope", name=names, by=actor(), why=why, started_s=time.time())
    signed = _purge_disk(path, order, roots)
    ledger = Path(ledger_url(path).removeprefix("sqlite:///"))
    # An engine without a server has no ledger.
    if database_url or default_database_url() or ledger.exists():
        with books(path, database_url) as open_books:
            open_books.accounts.trail.record(
                "cache.purge", names, by=order.by, after=signed, reason=why
            )
    answer(signed, json, *_lines(signed, order.kind, order.name))


def _chosen(folder: Path, starts: list[str]) -> tuple[set[PrefixKey], Removed]:
    """The scopes that begin with `starts`, and what they contain."""
    planned: dict[PrefixKey, Removed] = {}
    with open_shards(folder, readonly=True, groups=True) as (_, shards):
        for shard in shards:
            for root, account in shard.accounts().items():
                planned[root] = planned.get(root, Removed()).plus(Removed(*account))
    roots = {find_scope(planned, start) for start in starts}
    return roots, reduce(Removed.plus, (planned[root] for root in roots))


def _purge_beside(folder: Path, roots: set[PrefixKey], server: str, *, json: bool) -> None:
    """Purges the disk of a running server. Blocks in its memory stay, so there is no receipt."""
    gone = Removed()
    with (
        open_shards(folder, readonly=False, groups=True) as (_, shards),
        progress("purging", len(shards)) as advance,
    ):
        for shard in shards:
            gone = gone.plus(purge_shards([shard], roots))
            advance(1)
    told = gone._asdict() | {"scopes": sorted(root.hex() for root in roots), "server": server}
    blocks = f"{number_of(gone.num_blocks, 'block')} ({size(gone.stored_bytes)})"
    answer(told, json, f"{blocks} purged; their space is free for new blocks")
    note(
        f"a server holds this directory ({server}): blocks in its memory stay, and it may write "
        "them to disk again, so there is no receipt; --tenant or --group purges those as well, and "
        "--scope gives one once the server has stopped"
    )
