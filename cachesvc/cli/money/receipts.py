"""`cachesvc usage receipt`: prints signed receipts and checks them."""

import json as jsonlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from billing.operations import usage
from billing.reports.published import published_keys
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.options import existing_data_dir
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
    from billing.reports.receipts import verify_receipt

    signed = _read_receipt(path)
    key_id = str(signed.get("key_id"))
    if public_key is None:
        public_key = published_keys(existing_data_dir(data_dir)).get(key_id)
    if public_key is None:
        fail(f"key {key_id} never signed here; give the key that was published as --public-key")
    try:
        key = bytes.fromhex(public_key)
    except ValueError:
        fail(
            "--public-key is 64 hexadecimal digits, as `cachesvc usage receipt --public-keys` "
            "prints them",
            2,
        )
    if not verify_receipt(signed, key):
        fail("NOT genuine: the receipt was changed, or another key signed it")
    note(f"genuine: signed with key {key_id}")


def _read_receipt(path: Path) -> dict[str, object]:
    try:
        read = jsonlib.loads(sys.stdin.read() if str(path) == "-" else path.read_text())
    except (OSError, ValueError) as error:
        fail(f"{path} is not a receipt: {error}")
    if not isinstance(read, dict):
        fail(f"{path} is not a receipt, which is a JSON object")
    return read
