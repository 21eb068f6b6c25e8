"""Ledger entries: balanced, immutable, chained by hash. Pure values; the format that `verify`
proves.

An entry moves money between the accounts of one tenant. Each posting says what is added to an
account, credits positive, and the postings of an entry sum to zero: that is double entry. What the
tenant has is `granted + topup + receivable + scoped`; the other three are the operator's side.

    granted     promotional money, spent before paid money  cash       where top-ups came from
    topup       money paid in advance                       promotion  where grants came from
    receivable  zero or less: what the tenant owes           revenue    what was earned
    scoped      promotional money for some prices only, spent first

The hash of an entry is `sha256(hash before + json([tenant, seq, kind, request_id, at_ns, currency,
postings, body]))`; the first follows `genesis(tenant)`. Every number of money in JSON is a text.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

TENANT_ACCOUNTS = ("granted", "topup", "receivable", "scoped")
ACCOUNTS = (*TENANT_ACCOUNTS, "revenue", "cash", "promotion")
GRANTED = ("granted", "scoped")


class Kind(StrEnum):
    """What an entry is for; with tenant and request id it is unique."""

    CHARGE = "charge"  # one per settled request, also when it is zero
    GRANT = "grant"
    TOPUP = "topup"
    CORRECTION = "correction"  # gives back a charge, which it names
    WITHDRAWAL = "withdrawal"  # paid money paid out again
    CHARGEBACK = "chargeback"  # a payment that the payer's bank took back
    ADJUSTMENT = "adjustment"  # puts right a deposit, which it names
    WALLET = "wallet"  # money in another currency, in or out; moves nothing of the balance
    CONVERSION = "conversion"  # money of a wallet, converted into the balance
    EXPIRY = "expiry"  # takes back what is left of a grant, which it names, when its time is over


CORRECTABLE = (Kind.CHARGE, Kind.GRANT, Kind.TOPUP)
CORRECTING = (
    Kind.CORRECTION,
    Kind.ADJUSTMENT,
    Kind.EXPIRY,
)  # their bodies name the entry that they `corrects`


Postings = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. `request_id` is the request's, or the reference of a deposit or correction."""

    tenant: str
    seq: int  # from 1, without gaps, by tenant
    kind: Kind
    request_id: str
    at_ns: int  # never before the entry before it
    currency: str
    postings: str  # "topup:-8 revenue:8", in the order of ACCOUNTS, zeros left out
    body: str  # canonical JSON
    hash: bytes
    billed_ns: int | None = None  # a copy from the body, to be found by; None: it is `at_ns`

    @property
    def moment_ns(self) -> int:
        """The instant whose day and month it belongs to: a charge's is its admission."""
        return self.at_ns if self.billed_ns is None else self.billed_ns

    @property
    def amounts(self) -> dict[str, int]:
        return parse_postings(self.postings)

    @property
    def amount(self) -> int:
        """What the tenant gained, negative for a charge."""
        return sum(units for name, units in self.amounts.items() if name in TENANT_ACCOUNTS)

    @property
    def details(self) -> dict[str, Any]:
        details: dict[str, Any] = orjson.loads(self.body)
        return details


def genesis(tenant: str) -> bytes:
    """The hash before a tenant's first entry."""
    return hashlib.sha256(b"cachesvc.ledger.v1\0" + tenant.encode()).digest()


def format_postings(postings: Postings) -> str:
    """Canonical text of balanced postings."""
    assert sum(postings.values()) == 0, f"postings do not balance: {dict(postings)}"
    return " ".join(f"{name}:{postings[name]}" for name in ACCOUNTS if postings.get(name))


def parse_postings(text: str) -> dict[str, int]:
    """The postings of a text; raises `ValueError` on an unknown account or a sum that is not
    zero.
    """
    postings: dict[str, int] = {}
    for part in text.split():
        name, _, units = part.partition(":")
        if name not in ACCOUNTS or name in postings:
            raise ValueError(f"postings {text!r} name the account {name!r} wrongly")
        postings[name] = int(units)
    if sum(postings.values()):
        raise ValueError(f"postings {text!r} do not sum to zero")
    return postings


def canonical(body: Mapping[str, Any]) -> str:
    """JSON with sorted keys, without the empty values, the same on every machine."""
    kept = {name: value for name, value in body.items() if value not in (None, "", {}, False)}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS).decode()


def digest(
    before: bytes,
    tenant: str,
    seq: int,
    kind: str,
    request_id: str,
    at_ns: int,
    currency: str,
    postings: str,
    body: str,
) -> bytes:
    """The hash of an entry that follows the one with hash `before`."""
    fields = orjson.dumps([tenant, seq, kind, request_id, at_ns, currency, postings, body])
    return hashlib.sha256(before + fields).digest()
