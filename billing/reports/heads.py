"""Signed heads, stored elsewhere, which make any rewriting of the ledger's past detectable.

A head is the number and hash of the last entry of a chain, and that hash covers every entry before
it. Lines of signed heads are appended to a file or posted to a receiver; called off the event loop.
"""

import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from billing.errors import BillingError, ExportError, ReceiverError
from billing.outgoing import send
from billing.proof.result import Head
from billing.proof.trail import TRAIL, trail_head
from billing.reports.receipts import Purpose, ReceiptSigner, verify_receipt
from billing.store import reports as store_reports
from billing.store.store import LedgerStore

POST_TIMEOUT_S = 30.0
MOST_BYTES = 1024  # of an answer
Line = dict[str, Any]


def heads_of(store: LedgerStore) -> dict[str, Head]:
    """The last number and hash of each tenant's chain and of the admin trail."""
    with store.reading() as connection:
        accounts = store_reports.all_accounts(connection)
        trail = trail_head(connection)
    heads = {name: (account.seq, account.head.hex()) for name, account in accounts.items()}
    return {name: head for name, head in (*heads.items(), (TRAIL, trail)) if head[0]}


def heads_document(heads: dict[str, Head]) -> Line:
    return {name: {"entry": seq, "hash": digest} for name, (seq, digest) in heads.items()}


def signed_heads(store: LedgerStore, signer: ReceiptSigner, now_ns: int) -> Line:
    """The current heads, signed with the receipt key."""
    line = {"at_ns": now_ns, "heads": heads_document(heads_of(store))}
    return signer.sign(line, Purpose.HEADS)


def send_heads(line: Line, to: str) -> None:
    """Appends the line to a file, durably, or POSTs it to a URL. Raises `ExportError`."""
    data = orjson.dumps(line) + b"\n"
    try:
        if to.startswith(("http://", "https://")):
            _post(to, data)
            return
        with Path(to).expanduser().open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError, ReceiverError) as error:
        raise ExportError(f"the heads could not be written to {to}: {error}") from error


def _post(url: str, data: bytes) -> None:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data, headers, method="POST")  # noqa: S310  http(s) only
    send(request, timeout_s=POST_TIMEOUT_S, most_bytes=MOST_BYTES)


def parse_heads(
    text: bytes, where: str, public_key: Callable[[str], bytes | None]
) -> list[dict[str, Head]]:
    """The heads of `ledger verify --print-heads`, or lines that a server wrote.

    `public_key` returns a published key by its id. Raises `BillingError` for malformed heads and
    for a line with a wrong signature.
    """
    try:
        return [_read(document, public_key, where) for document in _documents(text)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BillingError(f"{where} holds no heads of a ledger: {error}") from error


def read_receipt_head(path: Path, public_key: Callable[[str], bytes | None]) -> dict[str, Head]:
    """The head in a receipt: its entry's number and hash. Raises `BillingError`."""
    try:
        receipt = orjson.loads(path.read_bytes())
        key_id = str(receipt["key_id"])
        if (key := public_key(key_id)) is None:
            raise BillingError(f"key {key_id} never signed here; give it as --public-key")
        if not verify_receipt(receipt, key):
            raise BillingError(f"{path} is NOT genuine: it was changed, or another key signed it")
        return {str(receipt["tenant"]): (int(receipt["entry"]), str(receipt["entry_hash"]))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BillingError(f"{path} is not a receipt: {error}") from error


def _documents(text: bytes) -> list[Line]:
    try:
        found = orjson.loads(text)
        return found if isinstance(found, list) else [found]
    except orjson.JSONDecodeError:
        return [orjson.loads(line) for line in text.splitlines() if line.strip()]


def _read(document: Line, public_key: Callable[[str], bytes | None], path: str) -> dict[str, Head]:
    if "signature" in document:
        key_id = str(document["key_id"])
        key = public_key(key_id)
        if key is None:
            raise BillingError(f"{path}: key {key_id} is not among the published ones")
        if not verify_receipt(document, key, Purpose.HEADS):
            raise BillingError(f"{path}: a line was changed, or another key signed it")
        document = document["heads"]
    return {name: (int(head["entry"]), str(head["hash"])) for name, head in document.items()}
