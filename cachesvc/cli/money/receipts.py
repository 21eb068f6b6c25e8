"""`cachesvc usage receipt`: prints signed receipts and checks them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from billing.operations import usage
from billing.reports.published import published_keys
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.options import data_dir_of, existing_data_dir
from cachesvc.cli.render import fail, note, print_documents, print_json


@operating("json")
def receipt(
    call: Invocation,
    tenant: Annotated[str | None, typer.Argument(help="Name of the tenant")] = None,
    request_id: Annotated[str | None, typer.Argument(help="Id of the request")] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Verify this receipt instead: a JSON file, or - for standard input"),
    ] = None,
    public_key: Annotated[
        str | None,
        typer.Option(help="With --check: the published key, in hex  [those of the data directory]"),
    ] = None,
    public_keys: Annotated[
        bool, typer.Option("--public-keys", help="Print the public keys instead, newest last")
    ] = False,
) -> None:
    """Print the signed receipt of one request, as JSON; or check one, without a server.

    --check exits with 1 if the receipt differs from what was signed.
    """
    if public_keys:
        _print_keys(published_keys(existing_data_dir(call.data_dir)), call.json)
    elif check is not None:
        _check(check, public_key, call.data_dir)
    elif tenant is None or request_id is None:
        fail("say which request: TENANT REQUEST_ID; or use --check or --public-keys", 2)
    else:
        print_json(call(usage.sign_receipt, tenant=tenant, request_id=request_id))


def _print_keys(found: Mapping[str, str], json: bool) -> None:
    keys = [{"key_id": name, "public_key": key} for name, key in found.items()]
    none = "no receipt was signed yet; the first one makes a key"
    print_documents(keys, json, ("key_id", "public_key"), none=none)


def _check(path: Path, public_key: str | None, data_dir: Path | None) -> None:
    from billing.reports.heads import read_receipt_head  # imports cryptography

    file = Path("/dev/stdin") if str(path) == "-" else path
    key_of = partial(public_key_of, public_key, data_dir_of(data_dir))
    for tenant, (entry, _) in read_receipt_head(file, key_of).items():
        note(f"genuine: entry {entry} of tenant {tenant}")


def public_key_of(given: str | None, data_dir: Path, key_id: str) -> bytes | None:
    """The key that was given in hex, or else the published one of this id."""
    try:
        found = given or published_keys(data_dir).get(key_id)
        return None if found is None else bytes.fromhex(found)
    except ValueError:
        told = "is 64 hexadecimal digits, as `cachesvc usage receipt --public-keys` prints them"
        raise typer.BadParameter(told, param_hint="--public-key") from None
