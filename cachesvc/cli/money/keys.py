"""`cachesvc keys`: API keys. A key is printed once, when it is made."""

import re
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from billing.accounts import KeyInfo
from billing.errors import BillingError
from billing.keys import Scope, format_scopes, parse_scopes
from billing.prices.book import NS
from billing.reports.documents import key_document, key_state
from cachesvc.cli.money.books import DatabaseUrl, DataDir, Reason, TenantOption, actor, books
from cachesvc.cli.render import AsJson, note, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys")

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@app.command()
def create(
    tenant: Annotated[str, typer.Option("--tenant", help="Whose key it is")],
    project: Annotated[str, typer.Option(help="Project that its usage is booked to")] = "",
    name: Annotated[str, typer.Option(help="A name to recognise it by")] = "",
    scopes: Annotated[
        list[str],
        typer.Option(
            "--scopes", "--scope", help=f"Comma-separated, or repeated: {', '.join(Scope)}"
        ),
    ] = ["inference,usage"],  # noqa: B006  read only
    expires_in: Annotated[
        str | None, typer.Option(help="How long it is valid, such as 12h or 90d")
    ] = None,
    reason: Reason = "",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Create a key and print it; it is not kept and cannot be shown again."""
    with books(data_dir, database) as open_books:
        key, info = open_books.accounts.create_key(
            tenant,
            project=project,
            name=name,
            scopes=_scopes(",".join(scopes)),
            expires_ns=_expiry(expires_in),
            by=actor(),
            reason=reason,
        )
        if json:
            print_json({"key": key, **_json(info)})
            return
        typer.echo(key)
        note(f"key {info.key_id} of tenant {tenant}: keep it safe, it is not shown again")


@app.command("list")
def list_keys(
    tenant: TenantOption = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """List keys by their prefix."""
    with books(data_dir, database) as open_books:
        open_books.accounts.expect(tenant)
        found = open_books.accounts.keys(tenant)
        if json:
            print_json([_json(info) for info in found])
            return
        print_table(
            ("id", "prefix", "tenant", "project", "name", "scopes", "state", "ends"),
            [
                (
                    info.key_id,
                    info.prefix + "...",
                    info.tenant,
                    info.project,
                    info.name,
                    format_scopes(info.scopes),
                    key_state(info, time.time_ns()),
                    _day(info.expires_ns),
                )
                for info in found
            ],
            spare=("id", "project", "name"),
        )


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="Id or prefix of the key")],
    reason: Reason = "",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """End a key at once."""
    with books(data_dir, database) as open_books:
        info = open_books.accounts.revoke_key(key.removesuffix("..."), by=actor(), reason=reason)
        if json:
            print_json(_json(info))
        else:
            note(f"key {info.key_id} of tenant {info.tenant} is revoked")


def _scopes(text: str) -> frozenset[Scope]:
    try:
        scopes = parse_scopes(text)
    except ValueError:
        scopes = frozenset()
    if not scopes:
        raise BillingError(f"scopes {text!r} are not among {', '.join(Scope)}")
    return scopes


def _expiry(text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text)
    if not found:
        raise BillingError(f"{text!r} is not a duration such as 12h or 90d")
    return time.time_ns() + int(found[1]) * _UNITS_S[found[2]] * NS


def _day(at_ns: int | None) -> str:
    """A day of UTC, or nothing for never."""
    return "" if at_ns is None else datetime.fromtimestamp(at_ns // NS, UTC).strftime("%Y-%m-%d")


def _json(info: KeyInfo) -> dict[str, Any]:
    return key_document(info, time.time_ns())
