"""`cachesvc cache purge`: every block of a tenant or a sharing group, with a signed receipt."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from api.format import number_of, size
from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import AsJson, answer, confirm, fail

PURGE_TIMEOUT_S = 600.0


def purge(
    tenant: Annotated[str | None, typer.Option(help="Every block of this tenant")] = None,
    group: Annotated[str | None, typer.Option(help="Every block of this sharing group")] = None,
    why: Annotated[
        str, typer.Option("--reason", help="Reason for the receipt and the audit trail")
    ] = "",
    data_dir: DataDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    json: AsJson = False,
) -> None:
    """Have the running server remove every block of a tenant from every tier, with a signed
    receipt."""
    if bool(tenant) == bool(group):
        fail("say whose blocks: either --tenant or --group", 2)
    if not why.strip():
        fail("say why with --reason: the receipt and the admin trail keep it", 2)
    kind, name = ("tenant", tenant) if tenant else ("group", group)
    server = running_server(data_dir)
    confirm(f"Purge every block of {kind} {name} from every tier?", yes=yes)
    body = {"kind": kind, "name": name, "why": why}
    signed = server.post("/admin/api/cache/purge", body, timeout_s=PURGE_TIMEOUT_S)
    answer(signed, json, *_lines(signed, f"{kind} {name}"))


def _lines(signed: Mapping[str, Any], owner: str) -> Iterator[str]:
    whose = f"of {owner} off"
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
