"""Signed receipts of one request's usage and cost, verifiable with the public key.

Signatures are Ed25519: unlike with a keyed hash, a customer can check a receipt without being able
to forge one. The private key is a file of the data directory, mode 0600. Every public key that ever
signed there is a line in another file and published. A receipt names its key by a short id, so
earlier receipts stay verifiable after a new key.
"""

import base64
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from billing import secret_file
from billing.errors import ReceiptKeyError, UnknownRequest
from billing.gate.entries import Entry
from billing.gate.holds import rate_ref
from billing.money import format_units, rate_per_million
from billing.prices.book import PriceBook
from billing.prices.rating import charge_in, short_hits
from billing.reports.published import PUBLIC_FILE, published_keys
from billing.store import reports as store_reports
from billing.store.store import LedgerStore
from billing.usage import Usage

KEY_FILE = "receipt_key"


class Purpose(StrEnum):
    """The purpose of a signature. A signature for one purpose is not valid for another."""

    RECEIPT = "receipt"
    HEADS = "heads"


class ReceiptSigner:
    """Signs with one private key. `published` are the public keys that ever signed, by id."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()  # 32 bytes
        self.published = {self.key_id: self.public_key.hex()}

    @classmethod
    def open(cls, data_dir: Path) -> "ReceiptSigner":
        """The signer of a data directory, whose key is created on first use. Raises
        `ReceiptKeyError`."""
        path = data_dir / KEY_FILE
        held = secret_file.read_or_make(
            path, lambda: Ed25519PrivateKey.generate().private_bytes_raw()
        )
        try:
            signer = cls(Ed25519PrivateKey.from_private_bytes(held))
        except ValueError:
            raise ReceiptKeyError(
                f"{path} does not hold an Ed25519 private key of 32 bytes; restore it from a copy, "
                "or remove it: a new one is made, and earlier receipts are checked against the "
                "public key that was published for them"
            ) from None
        if signer.key_id not in published_keys(data_dir):
            with (data_dir / PUBLIC_FILE).open("a") as file:
                file.write(f"{signer.key_id} {signer.public_key.hex()}\n")
        signer.published = published_keys(data_dir)
        return signer

    @property
    def key_id(self) -> str:
        """The first eight bytes of the public key, in hex."""
        return self.public_key[:8].hex()

    def sign(self, receipt: dict[str, Any], purpose: Purpose = Purpose.RECEIPT) -> dict[str, Any]:
        """The document with its signature, valid only for this purpose."""
        named = receipt | {"key_id": self.key_id}
        signature = self._key.sign(_canonical(named, purpose))
        return named | {"signature": base64.b64encode(signature).decode()}


def verify_receipt(
    receipt: dict[str, Any], public_key: bytes, purpose: Purpose = Purpose.RECEIPT
) -> bool:
    """Whether the holder of the key signed exactly this document for this purpose."""
    unsigned = {name: value for name, value in receipt.items() if name != "signature"}
    try:
        signature = base64.b64decode(receipt["signature"], validate=True)
        key = Ed25519PublicKey.from_public_bytes(public_key)
        key.verify(signature, _canonical(unsigned, purpose))
    except (InvalidSignature, KeyError, TypeError, ValueError):
        return False
    return True


def receipt_for(
    store: LedgerStore, book: PriceBook, signer: ReceiptSigner, tenant: str, request_id: str
) -> dict[str, Any]:
    """The signed receipt of a request. Raises `UnknownRequest` if it was never settled."""
    with store.reading() as connection:
        entry = store_reports.find_request(connection, tenant, request_id)
    if entry is None:
        raise UnknownRequest(f"tenant {tenant!r} has no settled request {request_id!r}")
    return signer.sign(describe(entry, book))


def describe(entry: Entry, book: PriceBook) -> dict[str, Any]:
    """A charge in words and exact decimals."""
    details = entry.details
    ref = rate_ref(details)
    usage = Usage.from_record(details.get("usage", {}))
    pinned = book.pinned(ref)
    charge = charge_in(details, pinned)
    note = short_hits(usage, pinned)
    return ({"note": note} if note else {}) | {
        "tenant": entry.tenant,
        "request_id": entry.request_id,
        "entry": entry.seq,
        "entry_hash": entry.hash.hex(),
        "settled_ns": entry.at_ns,
        "outcome": details["outcome"],
        "model": ref.model,
        "rate_card": ref.card,
        "version": ref.version,
        "window": ref.window,
        "prompt_tokens": usage.prompt,
        "hit_tokens": usage.hit,
        "lines": [
            {
                "class": line.name,
                "tokens": line.tokens,
                "per_million": rate_per_million(line.per_token),
                "amount": format_units(line.amount),
            }
            for line in charge.lines
        ],
        "currency": entry.currency,
        "amount": format_units(charge.amount),
        "saved": format_units(charge.saved),
    }


def _canonical(document: dict[str, Any], purpose: Purpose) -> bytes:
    return f"cachesvc.{purpose}.v1\0".encode() + orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
