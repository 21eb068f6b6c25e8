"""`cachesvc usage receipt*`: signed receipts, the keys to check them with, and the check."""

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from billing.operations import usage
from billing.reports import receipts
from billing.reports.receipts import published_keys
from cachesvc.cli.money.books import DatabaseUrl, DataDir, RequestId, TenantName
from cachesvc.cli.money.operations import operations
from cachesvc.cli.options import existing_data_dir
from cachesvc.cli.render import AsJson, fail, note, print_json, print_table


def receipt(
    tenant: TenantName,
    request_id: RequestId,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Print the signed receipt of one request, as JSON."""
    with operations(data_dir, database) as call:
        print_json(call(usage.sign_receipt, tenant=tenant, request_id=request_id))


def receipt_keys(data_dir: DataDir = None, json: AsJson = False) -> None:
    """Print the public keys that receipts are checked with, to publish; the last one signs now."""
    found = published_keys(existing_data_dir(data_dir))
    if json:
        print_json([{"key_id": name, "public_key": key} for name, key in found.items()])
        return
    print_table(("key_id", "public_key"), list(found.items()))
    if not found:
        note("no receipt was signed yet: the first one makes a key")


def verify_receipt(
    receipt: Annotated[Path, typer.Argument(help="The receipt, a JSON file; - reads it")],
    public_key: Annotated[
        str | None, typer.Option(help="The published key, in hex  [those of the data directory]")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Tell whether a receipt is word for word what was signed; needs its public key and no server.

    Ends with 1 where it is not.
    """
    signed = _read_receipt(receipt)
    key_id = str(signed.get("key_id"))
    if public_key is None:
        public_key = published_keys(existing_data_dir(data_dir)).get(key_id)
    if public_key is None:
        fail(f"key {key_id} never signed here; give the key that was published as --public-key")
    try:
        key = bytes.fromhex(public_key)
    except ValueError:
        fail("--public-key is 64 hexadecimal digits, as `cachesvc usage receipt-keys` prints them")
    if not receipts.verify_receipt(signed, key):
        fail("NOT genuine: the receipt was changed, or another key signed it")
    note(f"genuine: signed with key {key_id}")


def _read_receipt(path: Path) -> dict[str, object]:
    try:
        read = jsonlib.loads(sys.stdin.read() if str(path) == "-" else path.read_text())
    except (OSError, ValueError) as error:
        fail(f"{path} is no receipt: {error}")
    if not isinstance(read, dict):
        fail(f"{path} is no receipt, which is a JSON object")
    return read
