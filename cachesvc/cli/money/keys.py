"""`cachesvc keys`: API keys. A key is printed once, when it is made."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from billing.keys import Scope
from billing.operations import keys
from billing.prices.book import NS
from cachesvc.cli.money.books import TenantOption
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.options import duration
from cachesvc.cli.render import answer, note, print_documents, print_json

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys")


@app.command()
@operating("reason", "json")
def create(
    call: Invocation,
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant of the key")],
    project: Annotated[str, typer.Option(help="Project that its usage counts for")] = "",
    name: Annotated[str, typer.Option(help="A name to recognise it by")] = "",
    scopes: Annotated[
        list[str],
        typer.Option(
            "--scopes", "--scope", help=f"Comma-separated, or repeated: {', '.join(Scope)}"
        ),
    ] = ["inference,usage"],  # noqa: B006  read only
    expires_in: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="DURATION", help="Validity, such as 12h or 90d"),
    ] = None,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    names = [each.strip() for each in ",".join(scopes).split(",") if each.strip()]
    if expires_in is not None and not 1 <= expires_in <= keys.MAX_VALIDITY_S:
        raise typer.BadParameter("a key is valid for 1s to 36600d", param_hint="--expires-in")
    expires_in_s = None if expires_in is None else int(expires_in)
    given = {"scopes": keys.known_scopes(names), "expires_in_s": expires_in_s}
    made = call.change(keys.create_key, tenant=tenant, project=project, name=name, **given)
    answer(made, call.json, made["key"])
    if not call.json:
        note(f"key {made['id']} of tenant {tenant}: keep it safe, it is not shown again")


@app.command("list")
@operating("json")
def list_keys(call: Invocation, tenant: TenantOption = None) -> None:
    """List keys by their prefix."""
    columns = {
        "id": "id",
        "prefix": lambda key: f"{key['prefix']}...",
        **{name: name for name in ("tenant", "project", "name")},
        "scopes": lambda key: ",".join(key["scopes"]),
        "state": "state",
        "ends": lambda key: _day(key["expires_ns"]),
        "used": lambda key: key["last_used"] or "",
    }
    found = call(keys.list_keys, tenant=tenant)
    print_documents(found, call.json, columns, spare=("id", "project", "name"))


@app.command()
@operating("reason", "json")
def revoke(
    call: Invocation, key: Annotated[str, typer.Argument(help="Id or prefix of the key")]
) -> None:
    """Revoke a key at once."""
    revoked = call.change(keys.revoke_key, key_id=key.removesuffix("..."))
    if call.json:
        print_json(revoked)
    else:
        note(f"key {revoked['id']} of tenant {revoked['tenant']} is revoked")


def _day(at_ns: int | None) -> str:
    return "" if at_ns is None else datetime.fromtimestamp(at_ns // NS, UTC).strftime("%Y-%m-%d")
